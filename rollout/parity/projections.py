"""The two named projections of a row, the digest over one of them, and "the same rows".

`PARITY` is what a v1 and a v2 run of one conversation must share. `REPEATABLE` is what a batch
that was killed and resumed shares with one that was not. Both name the lake's columns.

Both read `metadata` with the times of its `lifecycle` masked (that each key is there, and that its
time is finite or null, still counts) and without session ids, response ids and the leaf's
descriptor; and of `failure` only its type.

Canonical encoding, over which `payload_digest` is taken. A value is one tag byte and its content;
every count and length is 8 bytes, unsigned, little-endian:

    null N            true T          false F
    int  I length, decimal ASCII      float D 8 bytes IEEE-754 little-endian
    text S length, UTF-8              bytes B length, bytes
    list L count, items               dict M count, then key (text) and value by key in UTF-8 order
    array A dtype as text (numpy's str, such as <f8), count of dimensions, each dimension, bytes
          in C order

The encoded value is the dict of the row's REPEATABLE columns, so a column that is added to the
projection changes every digest; `payload_digest` is blake2b over it, 256 bits.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rollout.parity.compare import diff_rows
from rollout.parity.rows import Row, row_of, rows_of
from rollout.sample import Sample

PAYLOAD = (
    "prompt",
    "tokens",
    "response",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "status",
    "reward",
    "reward_json",
    "label",
    "weight_versions",
    "weight_spans",
    "cached_tokens",
    "prompt_tokens",
    "routed_experts",
    "routed_experts_shape",
    "remove_sample",
    "metadata",
    "train_metadata",
)
"""The lake's payload columns."""

PARITY = ("index", "group_index", "rollout_id", "rollout_key", *PAYLOAD, "turns", "failure.type")
"""What both session versions must give, bit for bit."""

_UNREPEATABLE = ("cached_tokens", "weight_spans")
REPEATABLE = (
    *(name for name in PARITY if name not in _UNREPEATABLE),
    "sibling",
    "siblings",
    "session_version",
    "picker",
    "finisher",
    "control_text",
    "temperature",
    "top_p",
)
"""What an interrupted and resumed batch must share with an undisturbed one."""

LIFECYCLE_TIMES = ("t0", "t1", "req_ts", "prev_t1")
LEFT_OUT_OF_METADATA = ("leaf", "session_id", "response_id")
MASKED_TIME = "<time>"


def project(row: Row, columns: Sequence[str]) -> Row:
    """The row's `columns` as a projection reads them: `metadata` masked, `failure.type` taken out."""
    projected = {name: row[name] for name in columns if name in row}
    if "metadata" in projected:
        projected["metadata"] = mask_metadata(row["metadata"])
    if "failure.type" in columns:
        failure = row["failure"]
        projected["failure.type"] = None if failure is None else failure["type"]
    return projected


def mask_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """A copy of `metadata` without what differs between two runs of one conversation."""
    masked = {key: value for key, value in metadata.items() if key not in LEFT_OUT_OF_METADATA}
    lifecycle = masked.get("lifecycle")
    if isinstance(lifecycle, dict):
        masked["lifecycle"] = _mask_turn(lifecycle)
    elif isinstance(lifecycle, list):
        masked["lifecycle"] = [_mask_turn(turn) if isinstance(turn, dict) else turn for turn in lifecycle]
    return masked


def _mask_turn(turn: dict[str, Any]) -> dict[str, Any]:
    return {key: MASKED_TIME if key in LIFECYCLE_TIMES and _is_time(value) else value for key, value in turn.items()}


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def check_times(row: Row, *, prefix: str = "sample") -> list[str]:
    """Paths of lifecycle times that are neither null nor a finite number; masking cannot hide them."""
    lifecycle = row["metadata"].get("lifecycle")
    turns = lifecycle if isinstance(lifecycle, list) else [lifecycle]
    paths = []
    for position, turn in enumerate(turns):
        if not isinstance(turn, dict):
            continue
        where = f"{prefix}.metadata.lifecycle" + (f"[{position}]" if isinstance(lifecycle, list) else "")
        for key in LIFECYCLE_TIMES:
            value = turn.get(key)
            if value is not None and not _is_time(value):
                paths.append(f"{where}.{key}: {value!r} is not a finite time")
    return paths


def diff_projected(a: Row, b: Row, columns: Sequence[str], *, prefix: str = "sample") -> list[str]:
    """Every differing path of two rows under a projection."""
    paths = check_times(a, prefix=prefix) if "metadata" in columns else []
    return paths + diff_rows(project(a, columns), project(b, columns), columns, prefix=prefix)


def payload_digest(sample: Sample) -> bytes:
    """32 bytes that name the sample's `repeatable` projection; what the row carries as payload_digest."""
    return row_digest(row_of(sample))


def row_digest(row: Row) -> bytes:
    """`payload_digest` of a row as it was read back."""
    return hashlib.blake2b(canonical_bytes(project(row, REPEATABLE)), digest_size=32).digest()


def canonical_bytes(value: Any) -> bytes:
    """The canonical encoding of a payload value (module docstring): equal bytes, equal value.

    Raises:
        TypeError: a type that payloads do not have.
    """
    out: list[bytes] = []
    _encode(value, out)
    return b"".join(out)


_COUNT = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")


def _sized(tag: bytes, content: bytes, out: list[bytes]) -> None:
    out += (tag, _COUNT.pack(len(content)), content)


def _encode(value: Any, out: list[bytes]) -> None:
    kind = type(value)
    if value is None:
        out.append(b"N")
    elif kind is bool:
        out.append(b"T" if value else b"F")
    elif kind is int:
        _sized(b"I", str(value).encode(), out)
    elif kind is float:
        out += (b"D", _FLOAT.pack(value))
    elif kind is str:
        _sized(b"S", value.encode(), out)
    elif kind is bytes:
        _sized(b"B", value, out)
    elif kind is list:
        out += (b"L", _COUNT.pack(len(value)))
        for item in value:
            _encode(item, out)
    elif kind is dict:
        out += (b"M", _COUNT.pack(len(value)))
        for key in sorted(value, key=str.encode):
            _encode(key, out)
            _encode(value[key], out)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        name = value.dtype.str.encode()
        out += (b"A", _COUNT.pack(len(name)), name, _COUNT.pack(value.ndim))
        out.extend(_COUNT.pack(size) for size in value.shape)
        out.append(value.tobytes())
    else:
        raise TypeError(f"a {kind.__name__} has no canonical encoding")


def same_rows(a: pa.Table, b: pa.Table) -> list[str]:
    """Differences of two batches' samples under `repeatable`; empty when they are the same rows.

    Rows are paired by (index, sibling), in whatever order the tables hold them. Paths begin with
    `row[index,sibling]`; a row that only one table has, or has twice, is named.
    """
    left, right = _by_place(a), _by_place(b)
    paths = []
    for place in sorted(left.keys() | right.keys()):
        rows_a, rows_b = left.get(place, []), right.get(place, [])
        name = f"row[{place[0]},{place[1]}]"
        if len(rows_a) != 1 or len(rows_b) != 1:
            paths.append(f"{name}: {len(rows_a)} rows != {len(rows_b)} rows, want one each")
            continue
        paths += diff_projected(rows_a[0], rows_b[0], REPEATABLE, prefix=name)
    return paths


def _by_place(table: pa.Table) -> dict[tuple[int, int], list[Row]]:
    places: dict[tuple[int, int], list[Row]] = {}
    for row in rows_of(table):
        places.setdefault((row["index"], row["sibling"]), []).append(row)
    return places
