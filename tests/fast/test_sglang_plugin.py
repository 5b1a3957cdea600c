"""The CPU plugin's own parts, without SGLang: its hash, and that a moved name is said aloud."""

import struct
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

SOURCE = Path(__file__).parents[2] / "rollout/engine/sglang_cpu_plugin/src"

PUBLISHED = [
    (b"", 0x00000000),
    (b"test", 0xBA6BD213),
    (b"Hello, world!", 0xC0363E43),
    (b"The quick brown fox jumps over the lazy dog", 0x2E4FF723),
]
"""MurmurHash3 x86-32 with seed 0."""


def murmur3(data: bytes) -> int:
    """The published hash over bytes, in plain Python."""
    word_mask, hashed = 0xFFFFFFFF, 0

    def scrambled(word: int) -> int:
        word = word * 0xCC9E2D51 & word_mask
        return (word << 15 | word >> 17) * 0x1B873593 & word_mask

    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        hashed ^= scrambled(word)
        hashed = (hashed << 13 | hashed >> 19) & word_mask
        hashed = (hashed * 5 + 0xE6546B64) & word_mask
    if data[whole:]:
        hashed ^= scrambled(int.from_bytes(data[whole:], "little"))
    hashed ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ hashed >> shift) * factor & word_mask
    return hashed ^ hashed >> 16


@pytest.fixture(scope="module")
def murmur():
    sys.path.insert(0, str(SOURCE))
    try:
        yield import_module("rollout_sglang_cpu.murmur")
    finally:
        sys.path.remove(str(SOURCE))


@pytest.mark.parametrize(("data", "wanted"), PUBLISHED)
def test_the_plain_formulation_gives_the_published_values(data, wanted):
    assert murmur3(data) == wanted


@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    position=st.integers(0, 2**31 - 1),
    columns=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
)
def test_the_tensors_hash_as_bytes_do(murmur, seeds, position, columns):
    positions = [position + n for n in range(len(seeds))]
    found = murmur.murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    wanted = [
        [murmur3(struct.pack("<qII", seed, where & 0xFFFFFFFF, column)) for column in columns]
        for seed, where in zip(seeds, positions, strict=True)
    ]
    assert found.dtype == torch.uint32
    assert found.tolist() == wanted


def test_a_name_that_sglang_moved_ends_its_start(murmur):
    hooks = import_module("rollout_sglang_cpu.hooks")
    with pytest.raises(SystemExit, match=r"which has no sglang\.srt\.batch_invariant_ops"):
        hooks.find("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode")
