"""What two generations of one prompt share: up to which token, and how far their log-probs are apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.parity.compare import show
from rollout.parity.ulp import Unit, same_bits, ulp_distances, unit_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outputs:
    """Two outputs compared. Positions count an output's sampled ids from 0; `_S` counts those that both share.

    Behind the first differing token the two contexts are not the same, so log-probs are compared on the
    shared ids in front of it alone.

    first_token     where the ids part, or one output ends before the other; null: the same ids
    first_log_prob  first shared id whose log-prob has other bits; null: none
    ulps_S          distances of the shared ids' log-probs, in ULP of `unit`
    largest         greatest absolute difference of a log-prob, in nats
    path            the first difference in words, without where the turn is; "" where there is none
    """

    first_token: int | None
    first_log_prob: int | None
    ulps_S: NDArray[np.int64]
    unit: Unit
    largest: float
    path: str

    @property
    def equal(self) -> bool:
        """The same ids with the same log-prob bits."""
        return self.first_token is None and self.first_log_prob is None

    @property
    def max_ulp(self) -> int:
        return int(self.ulps_S.max(initial=0))


def compare_outputs(
    ids_A: NDArray[np.int32],
    log_probs_A: NDArray[np.float64],
    ids_B: NDArray[np.int32],
    log_probs_B: NDArray[np.float64],
) -> Outputs:
    """Compare output A with output B, each its ids (int32) and their log-probs (float64)."""
    n_both = min(len(ids_A), len(ids_B))
    parted = np.flatnonzero(ids_A[:n_both] != ids_B[:n_both])
    n_shared = int(parted[0]) if len(parted) else n_both
    first_token = n_shared if len(parted) or len(ids_A) != len(ids_B) else None
    a, b = log_probs_A[:n_shared], log_probs_B[:n_shared]
    unit = unit_of(a, b)
    moved = np.flatnonzero(~same_bits(a, b))
    first_log_prob = int(moved[0]) if len(moved) else None
    path = ""
    if first_log_prob is not None:
        left, right = float(a[first_log_prob]), float(b[first_log_prob])
        path = f"output_log_probs[{first_log_prob}]: {show(left)} != {show(right)}"
    elif first_token is not None:
        path = token_path(ids_A, ids_B, first_token)
    return Outputs(
        first_token=first_token,
        first_log_prob=first_log_prob,
        ulps_S=ulp_distances(a, b, unit),
        unit=unit,
        largest=float(np.abs(a - b).max(initial=0.0)),
        path=path,
    )


def token_path(ids_A: NDArray[np.int32], ids_B: NDArray[np.int32], place: int) -> str:
    """How two outputs part at `place`, one of which may have ended there."""
    left, right = (str(ids[place]) if place < len(ids) else "<end>" for ids in (ids_A, ids_B))
    return f"output_ids[{place}]: {left} != {right}"
