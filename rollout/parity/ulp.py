"""How far two log-probs are apart, in units in the last place (ULP).

SGLang computes log-probs in float32 and writes them as JSON doubles, so a distance in float64's units
would count half a billion for one bit of the engine's. `unit_of` says which unit fits two outputs: the
coarser of the two sides' own precisions. Only where both sides' values are no float32 it is float64 (the
embedded engine's log-probs are doubles); where one side's are, the other is rounded to float32, and what
is left is a distance on the grid that both can show.

The distance of two numbers is how many numbers of the unit one has to pass from one to the other:
0 between -0.0 and 0.0 (whose bits differ), 1 between neighbours, across zero as well. It says nothing
about bits: `same_bits` does.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Unit = Literal["float32", "float64"]

FAR = 2**63 - 1
"""The distance of a NaN from anything with other bits, and of doubles that are farther apart than that."""


def unit_of(a_N: NDArray[np.float64], b_N: NDArray[np.float64]) -> Unit:
    """float32 if the values of either side are exactly float32 ones, else float64.

    Zeros and NaNs are values of both kinds, so a side with nothing else goes with the other.
    """
    kinds = [_kind(side) for side in (a_N, b_N)]
    return "float32" if "float32" in kinds or kinds == [None, None] else "float64"


def _kind(values: NDArray[np.float64]) -> Unit | None:
    telling = values[(values != 0.0) & ~np.isnan(values)]
    if not len(telling):
        return None
    with np.errstate(over="ignore"):
        rounded = telling.astype(np.float32).astype(np.float64)
    return "float32" if (rounded == telling).all() else "float64"


def ulp_distances(a_N: NDArray[np.float64], b_N: NDArray[np.float64], unit: Unit) -> NDArray[np.int64]:
    """Distances of two arrays of one shape, item by item, in ULP of `unit`; 0 to FAR.

    Args:
        a_N, b_N: float64; for the unit float32 they are rounded to it first.
    """
    if unit == "float32":
        with np.errstate(over="ignore"):
            rounded = [array.astype(np.float32) for array in (a_N, b_N)]
        a, b = (_places(array.view(np.int32).astype(np.int64), -(2**31)) for array in rounded)
        distances: NDArray[np.int64] = np.abs(a - b)
    else:
        a, b = (_places(np.ascontiguousarray(array).view(np.int64), -(2**63)) for array in (a_N, b_N))
        high, low = np.maximum(a, b).view(np.uint64), np.minimum(a, b).view(np.uint64)
        distances = np.minimum(high - low, np.uint64(FAR)).astype(np.int64)  # modulo 2**64, so exact
    unordered = (np.isnan(a_N) | np.isnan(b_N)) & ~same_bits(a_N, b_N)
    distances[unordered] = FAR
    distances[same_bits(a_N, b_N)] = 0
    return distances


def _places(bits: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """Where floats stand among all floats of their kind: sign and magnitude as one integer that grows with them."""
    places: NDArray[np.int64] = np.where(bits < 0, least - bits, bits)
    return places


def same_bits(a_N: NDArray[np.float64], b_N: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Item by item: are the doubles the same 64 bits."""
    same: NDArray[np.bool_] = np.ascontiguousarray(a_N).view(np.int64) == np.ascontiguousarray(b_N).view(np.int64)
    return same
