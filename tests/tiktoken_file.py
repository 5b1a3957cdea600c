"""A tiktoken rank file as a tokenizer.json: the same vocabulary, its merges worked out from the ranks."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def to_tokenizer_json(ranks_file: Path, *, pattern: str, added: dict[str, tuple[int, bool]], nfc: bool) -> str:
    """The JSON text.

    Args:
        pattern: regex that cuts a text into the pieces within which bytes are merged.
        added: added tokens with their ids, and whether they are special.
        nfc: whether texts are normalised to NFC first.
    """
    lines = ranks_file.read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    merges = [pair for token, rank in ranks.items() if len(token) > 1 and (pair := _last_merge(ranks, token, rank))]
    letters = _letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": text, **plain, "special": special}
                for text, (number, special) in added.items()
            ],
            "normalizer": {"type": "NFC"} if nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": _model(
                {spell(token): rank for token, rank in ranks.items()},
                [[spell(left), spell(right)] for left, right in merges],
            ),
        },
        ensure_ascii=False,
    )


def _model(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    # A piece that is a token is never merged from its bytes: tiktoken looks whole pieces up first.
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": True, "byte_fallback": False}


def _last_merge(ranks: dict[bytes, int], token: bytes, rank: int) -> tuple[bytes, bytes] | None:
    """The two tokens that merges of lower rank leave of a token's bytes; None where it is never merged."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[place] + parts[place + 1], rank), place) for place in range(len(parts) - 1)]
        best, place = min(pairs)
        if best >= rank:
            return None
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def _letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it is printable, else one from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
