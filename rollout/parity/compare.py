"""Bit comparison of payload values: every place where two values differ, named by its path.

Equal means: the same type (int, bool and float are three), ints exact, floats by their IEEE-754
bits (-0.0 is not 0.0, NaN payloads count), numpy arrays by dtype, shape and bytes, lists in order,
dicts by key whatever their order.

A difference reads `<path>: <left> != <right>`, for example `sample.rollout_id: None != 0`,
`sample.rollout_log_probs[17]: 0xbfe0000000000000 (-0.5) != 0xbfe0000000000001 (-0.5000000000000001)`,
`sample.metadata.foo: 1 != 2`, `sample.tokens: length 3 != 4`. Long runs are cut, never in silence:
`sample.tokens: 40 more positions differ`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.parity.rows import SAMPLE_COLUMNS, Row, row_of
from rollout.sample import Sample

MAX_POSITIONS = 16
"""Differing positions of one list or array that are listed; the rest is counted."""

TEXT_WINDOW = 24
"""Characters of a text that are shown around its first difference."""

ABSENT = "<absent>"
_PLAIN = (str, int, bytes, bool, type(None))


def diff_samples(a: Sample, b: Sample, fields: Sequence[str] = SAMPLE_COLUMNS, *, prefix: str = "sample") -> list[str]:
    """Every differing path of two samples, by the lake's column names.

    Args:
        fields: columns that count, in the order in which they are reported.
    """
    return diff_rows(row_of(a), row_of(b), fields, prefix=prefix)


def diff_rows(a: Row, b: Row, fields: Sequence[str], *, prefix: str = "sample") -> list[str]:
    """Every differing path of two rows (column name to value) in the columns `fields`.

    Raises:
        KeyError: a row lacks one of the columns.
    """
    paths: list[str] = []
    for name in fields:
        if not _same_scalar(a[name], b[name]):
            _diff(a[name], b[name], f"{prefix}.{name}", paths)
    return paths


def diff_values(a: Any, b: Any, path: str) -> list[str]:
    """Every differing path below `path`; empty when both values are the same bits.

    Raises:
        TypeError: a type that payloads do not have (tuple, set, object array, ...).
    """
    paths: list[str] = []
    _diff(a, b, path, paths)
    return paths


def _same_scalar(a: Any, b: Any) -> bool:
    """Sure to be the same, at a glance: no path needs to be built. False says nothing."""
    kind = type(a)
    return kind is type(b) and (kind in _PLAIN or (kind is float and a != 0.0)) and bool(a == b)


def _diff(a: Any, b: Any, path: str, paths: list[str]) -> None:
    if type(a) is not type(b):
        paths.append(f"{path}: {show(a)} != {show(b)}")
    elif isinstance(a, np.ndarray):
        _diff_arrays(a, b, path, paths)
    elif type(a) is float:
        if a != b or a == 0.0:
            bits_a, bits_b = struct.pack("<d", a), struct.pack("<d", b)
            if bits_a != bits_b:
                paths.append(f"{path}: {show(a)} != {show(b)}")
    elif type(a) is dict:
        _diff_dicts(a, b, path, paths)
    elif type(a) is list:
        _diff_lists(a, b, path, paths)
    elif type(a) is str:
        if a != b:
            paths.append(f"{path}: {_show_texts(a, b)}")
    elif type(a) in _PLAIN:
        if a != b:
            paths.append(f"{path}: {show(a)} != {show(b)}")
    else:
        raise TypeError(f"{path}: a {type(a).__name__} is not a payload value")


def _diff_dicts(a: Mapping[Any, Any], b: Mapping[Any, Any], path: str, paths: list[str]) -> None:
    open_keys = [key for key in a if key not in b or not _same_scalar(a[key], b[key])]
    open_keys += [key for key in b if key not in a]
    for key in sorted(open_keys, key=str):
        inner = f"{path}.{key}"
        if key not in b:
            paths.append(f"{inner}: {show(a[key])} != {ABSENT}")
        elif key not in a:
            paths.append(f"{inner}: {ABSENT} != {show(b[key])}")
        else:
            _diff(a[key], b[key], inner, paths)


def _diff_lists(a: list[Any], b: list[Any], path: str, paths: list[str]) -> None:
    if len(a) != len(b):
        paths.append(f"{path}: length {len(a)} != {len(b)}")
    n_listed = n_more = 0
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if _same_scalar(left, right):
            continue
        found: list[str] = []
        _diff(left, right, f"{path}[{position}]", found)
        if not found:
            continue
        if n_listed < MAX_POSITIONS:
            paths.extend(found)
            n_listed += 1
        else:
            n_more += 1
    _say_more(path, n_more, paths)


def _diff_arrays(a: NDArray[Any], b: NDArray[Any], path: str, paths: list[str]) -> None:
    if a.dtype.hasobject or b.dtype.hasobject:
        raise TypeError(f"{path}: an array of Python objects is not a payload value")
    if a.dtype != b.dtype:
        paths.append(f"{path}: dtype {a.dtype} != {b.dtype}")
        return
    if a.shape == b.shape:
        if a.tobytes() == b.tobytes():
            return
    elif a.ndim == b.ndim == 1:
        paths.append(f"{path}: length {len(a)} != {len(b)}")
        n_common = min(len(a), len(b))
        a, b = a[:n_common], b[:n_common]
    else:
        paths.append(f"{path}: shape {a.shape} != {b.shape}")
        return
    differing = np.flatnonzero(_differing_positions(a, b))
    for flat in differing[:MAX_POSITIONS].tolist():
        index = ",".join(str(int(i)) for i in np.unravel_index(flat, a.shape)) if a.ndim != 1 else str(flat)
        left, right = _show_item(a, flat), _show_item(b, flat)
        paths.append(f"{path}[{index}]: {left} != {right}")
    _say_more(path, len(differing) - MAX_POSITIONS, paths)


def _differing_positions(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Per item, in C order: do its bytes differ. Both have one shape and dtype."""
    size = a.dtype.itemsize
    left = np.frombuffer(a.tobytes(), np.uint8).reshape(-1, size)
    right = np.frombuffer(b.tobytes(), np.uint8).reshape(-1, size)
    differing: NDArray[np.bool_] = (left != right).any(axis=1)
    return differing


def _show_item(array: NDArray[Any], flat: int) -> str:
    item = np.ascontiguousarray(array.reshape(-1)[flat : flat + 1])
    if array.dtype.kind == "f":
        number = int.from_bytes(item.astype(item.dtype.newbyteorder("<")).tobytes(), "little")
        return f"0x{number:0{2 * array.dtype.itemsize}x} ({item[0]!s})"
    if array.dtype.kind in "iub":
        return repr(item[0].item())
    return f"0x{item.tobytes().hex()}"


def _say_more(path: str, n_more: int, paths: list[str]) -> None:
    if n_more > 0:
        paths.append(f"{path}: {n_more} more {'position differs' if n_more == 1 else 'positions differ'}")


def show(value: Any) -> str:
    """A value as a path shows it: floats with their bits, long things cut with their length."""
    if type(value) is float:
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016x} ({value!r})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of shape {value.shape}"
    text = repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:60]}... ({len(value)} long)" if hasattr(value, "__len__") else f"{text[:60]}..."


def _show_texts(a: str, b: str) -> str:
    if max(len(a), len(b)) <= 2 * TEXT_WINDOW:
        return f"{a!r} != {b!r}"
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, at - TEXT_WINDOW // 2)
    left, right = a[start : start + TEXT_WINDOW], b[start : start + TEXT_WINDOW]
    return f"{left!r} != {right!r} (from character {start}; {len(a)} and {len(b)} characters)"
