"""How SGLang is started: one function for each kind of hardware, and nothing else decides a flag.

Every flag that changes bits stands here, and so in the `engine` column of each row (`flags`, and
their hash). A GPU recipe's flags have been read from SGLang's documentation and its reference parity
lane; which of them have run on a GPU is said in infra/README.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout.errors import BadConfig

DETERMINISTIC = "--enable-deterministic-inference"
"""Without it SGLang ignores a request's sampling_seed. On a GPU its kernels are batch-invariant, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to start SGLang.

    name           what the user calls it (`engine_recipe`)
    flags          of sglang.launch_server, without model, host and port
    gpus           GPUs of one engine; 0 is a CPU. More than one: tensor parallel, and `flags` say so
    engines        engines of one host; None: as many as the host's GPUs allow
    environment    variables of the engine's process
    deterministic  whether the same request gives the same bits again, alone on a CPU, at any width on a GPU
    """

    name: str
    flags: tuple[str, ...]
    gpus: int
    engines: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = True

    @property
    def stated(self) -> tuple[str, ...]:
        """What a row says of them: the flags, and the variables as NAME=VALUE."""
        return (*self.flags, *(f"{name}={value}" for name, value in sorted(self.environment.items())))

    @property
    def flags_hash(self) -> str:
        """sha256 over the flags and variables, first 16 hex digits."""
        return hashlib.sha256("\0".join(self.stated).encode()).hexdigest()[:16]


def tiny_cpu() -> Recipe:
    """The shipped checkpoint, or another of its size, on two CPU cores; for tests.

    No prefix is reused between requests: a reused one moves the last bits of what follows, so a row
    would depend on what the engine had served before, or on whether it was started again. One thread,
    for two reasons: their number moves the last bits, and several that wait for each other on cores
    that others use too are ten times slower. Nothing is compiled: that takes half a minute at the first
    seeded turn, and gives the same bits. Without work it sleeps, until a request wakes it: it would take
    one of the two cores all the time.
    """
    flags = "--device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 32768"
    flags += f" --max-running-requests 32 --random-seed 0 {DETERMINISTIC} --disable-radix-cache --sleep-on-idle"
    environment = {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return Recipe(name="tiny_cpu", flags=tuple(flags.split()), gpus=0, engines=1, environment=environment)


def qwen3_8b_h200() -> Recipe:
    """Qwen3-8B on each H200 of the host: the flags of the reference parity lane."""
    flags = f"{DETERMINISTIC} --attention-backend fa3 --disable-radix-cache --mem-fraction-static 0.5"
    return Recipe(name="qwen3_8b_h200", flags=tuple(flags.split()), gpus=1)


def qwen3_30b_a3b_h200x8() -> Recipe:
    """Qwen3-30B-A3B on eight H200: eight engines, one a GPU.

    Its 61 GB in bf16 leave half of an H200's 141 GB for the KV cache, and with 3 B active parameters a
    token's matrices are small: tensor parallel would add two all-reduces a layer to them and win
    nothing, so the host's GPUs serve different sessions. The experts that each token took can be asked for.
    """
    flags = f"{DETERMINISTIC} --attention-backend fa3 --disable-radix-cache --mem-fraction-static 0.8"
    flags += " --enable-return-routed-experts"
    return Recipe(name="qwen3_30b_a3b_h200x8", flags=tuple(flags.split()), gpus=1, engines=8)


RECIPES: dict[str, Callable[[], Recipe]] = {
    make.__name__: make for make in (tiny_cpu, qwen3_8b_h200, qwen3_30b_a3b_h200x8)
}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        BadConfig: there is none; the message names those there are.
    """
    if name not in RECIPES:
        raise BadConfig(f"engine_recipe {name!r}: there is {', '.join(RECIPES)}")
    return RECIPES[name]()
