"""The identity rule: which samples carry a `rollout_id`, and the lake's key that is never null.

Binding text: README, "The identity rule". Each line has a lock test in tests/fast/test_identity.py.
"""

from __future__ import annotations

import hashlib
from typing import Literal

SessionVersion = Literal["v1", "v2"]
"""How a session keeps its conversation: v1 linear, v2 tree."""

NO_IDENTITY = "v2 agentic samples require input Sample.rollout_id or Sample.index"


def resolve_rollout_id(
    version: SessionVersion, n_samples: int, *, input_rollout_id: int | None, input_index: int | None
) -> int | None:
    """The `rollout_id` that every sample of one rollout gets.

    A singleton of either version keeps what the input had. Only several v2 samples share one:
    the input's, else its index. 0 is an id.

    Raises:
        ValueError: several v2 samples, and the input has neither; or a v1 result with several.
    """
    if n_samples <= 1:
        return input_rollout_id
    if version == "v1":
        raise ValueError(f"a v1 session gives one sample, not {n_samples}")
    if input_rollout_id is not None:
        return input_rollout_id
    if input_index is None:
        raise ValueError(NO_IDENTITY)
    return input_index


def resolve_rollout_key(rollout_id: int | None, index: int) -> int:
    """The lake's grouping column: `rollout_id` if there is one, else the input's index."""
    return rollout_id if rollout_id is not None else index


def sample_id(batch_id: str, rollout_key: int, sibling: int) -> str:
    """32 hex digits that name one sample for ever: blake2b over its three identifying columns."""
    name = f"{batch_id}\x00{rollout_key}\x00{sibling}".encode()
    return hashlib.blake2b(name, digest_size=16).hexdigest()
