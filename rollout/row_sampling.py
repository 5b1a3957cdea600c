"""Sampling parameters that a prompt row sets for itself, in `metadata.sampling`, within the batch's bounds.

A batch's `sampling_bounds` names each parameter that rows may set, and its range:
`temperature=0:1.2,max_new_tokens=16:512`. A row sets any of those; the others are the batch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Bounds = dict[str, tuple[float, float]]
"""Least and greatest value by parameter, both allowed."""

ROW_SAMPLING = "sampling"
"""The key of a row's metadata that holds its own parameters."""

PARAMETERS: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "max_new_tokens": int}
"""What a row may set at all, in SGLang's names, as the batch itself can; an int's value has no fraction."""


def parse_bounds(text: str) -> Bounds:
    """The bounds that `text` states.

    Raises:
        ValueError: saying what is wanted.
    """
    bounds: Bounds = {}
    for part in text.split(","):
        name, _, span = (piece.strip() for piece in part.partition("="))
        low, _, high = span.partition(":")
        if name not in PARAMETERS:
            raise ValueError(f"{name!r} is no parameter of a row, want one of {', '.join(PARAMETERS)}")
        if name in bounds:
            raise ValueError(f"{name} stands twice")
        try:
            bounds[name] = (float(low), float(high))
        except ValueError as error:
            raise ValueError(f"{part.strip()!r}: want name=least:greatest, as temperature=0:1.2") from error
        if not -math.inf < bounds[name][0] <= bounds[name][1] < math.inf:
            raise ValueError(f"{part.strip()!r}: the least value comes first, and both are finite")
    return bounds


def row_sampling(metadata: Mapping[str, Any], bounds: Bounds | None) -> dict[str, Any]:
    """What a row sets for itself; empty where it says nothing. `bounds` None: rows may set nothing.

    Raises:
        ValueError: one line that names the parameter and what is allowed.
    """
    given = metadata.get(ROW_SAMPLING)
    if given is None:
        return {}
    if bounds is None:
        raise ValueError(
            "metadata.sampling is given, but the batch lets rows set nothing: allow it with sampling_bounds, "
            "as temperature=0:1.2,max_new_tokens=16:512"
        )
    if not isinstance(given, Mapping):
        raise ValueError("metadata.sampling is no object")
    for name, value in given.items():
        where = f"metadata.sampling.{name}"
        if name not in bounds:
            raise ValueError(f"{where}: sampling_bounds allows only {', '.join(bounds)}")
        _check(where, value, PARAMETERS[name], *bounds[name])
    return dict(given)


def _check(where: str, value: Any, kind: type, low: float, high: float) -> None:
    good = isinstance(value, int) or (kind is float and isinstance(value, float))
    if not good or isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}, want {'an integer' if kind is int else 'a number'}")
    if not low <= value <= high:
        raise ValueError(f"{where} is {value!r}, want {low:g} to {high:g}")
