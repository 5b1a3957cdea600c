"""One training sample: what the model saw and sampled, with its masks, bits and identity.

Shapes: `_T` counts all tokens of a sample, `_R` the response (everything behind the first prompt).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import Failure
from rollout.identity import SessionVersion


class Status(StrEnum):
    """How a sample ended; `failed` is a rollout without a sample of its own."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
    PENDING = "pending"


class InvalidSample(ValueError):
    """A sample whose lists, mask or numbers contradict each other; names the field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpan:
    """Sampled tokens [start, end) of the response came from weights `version`."""

    version: str
    start: int
    end: int


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One row of training data before it gets its batch columns (lake contract: samples).

    Compare samples with `rollout.parity.compare`, which looks at bits: `==` on floats does not.
    """

    # Identity
    group_index: int | None = None
    index: int | None = None
    attempt: int = 0
    rollout_id: int | None = None
    sibling: int = 0
    siblings: int = 1
    # Payload
    prompt: list[dict[str, Any]] = field(default_factory=list)
    tokens_T: NDArray[np.int32]
    response: str = ""
    response_length: int
    loss_mask_R: NDArray[np.int8]
    rollout_log_probs_R: NDArray[np.float64]
    status: Status
    reward: float | None = None
    reward_json: str | None = None
    label: str | None = None
    weight_versions: list[str] = field(default_factory=list)
    weight_spans: list[WeightSpan] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    # int32, little-endian: (tokens - 1, layers, experts per token), row i which experts token i was routed to
    routed_experts: bytes | None = None
    routed_experts_shape: list[int] | None = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    # Trail
    session_version: SessionVersion = "v2"
    agent: str = ""
    turns: int = 0
    leaf_path: list[int] | None = None
    picker: str = ""
    finisher: str = ""
    drift: str | None = None
    control_text: int = 0
    lora: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    failure: Failure | None = None

    def validate(self) -> None:
        """Check what every reader relies on.

        Raises:
            InvalidSample: naming the field and both numbers that disagree.
        """
        _check_dtype("tokens", self.tokens_T, np.dtype(np.int32))
        _check_dtype("loss_mask", self.loss_mask_R, np.dtype(np.int8))
        _check_dtype("rollout_log_probs", self.rollout_log_probs_R, np.dtype(np.float64))
        n_tokens, n_response = len(self.tokens_T), self.response_length
        if not 0 <= n_response <= n_tokens:
            raise InvalidSample(f"response_length: {n_response} is not within 0..{n_tokens}")
        for name, values in (("loss_mask", self.loss_mask_R), ("rollout_log_probs", self.rollout_log_probs_R)):
            if len(values) != n_response:
                raise InvalidSample(f"{name}: {len(values)} entries, response_length is {n_response}")
        if ((self.loss_mask_R != 0) & (self.loss_mask_R != 1)).any():
            raise InvalidSample("loss_mask: only 0 and 1 are allowed")
        if (self.tokens_T < 0).any():
            raise InvalidSample("tokens: an id is negative")
        if not np.isfinite(self.rollout_log_probs_R).all():
            raise InvalidSample("rollout_log_probs: a value is not finite")
        if self.reward is not None and not np.isfinite(self.reward):
            raise InvalidSample(f"reward: {self.reward} is not finite")
        if not 0 <= self.sibling < self.siblings:
            raise InvalidSample(f"sibling: {self.sibling} is not within 0..{self.siblings - 1}")
        if self.failure is not None and (self.reward is not None or not self.remove_sample):
            raise InvalidSample("failure: a failed rollout has no reward and remove_sample set")
        self._check_routed_experts()
        for span in self.weight_spans:
            if not 0 <= span.start <= span.end <= n_response:
                raise InvalidSample(f"weight_spans: [{span.start}, {span.end}) is outside the response")

    def _check_routed_experts(self) -> None:
        data, shape = self.routed_experts, self.routed_experts_shape
        if data is None and shape is None:
            return
        if data is None or shape is None or len(data) != 4 * prod(shape):
            size = "none" if data is None else f"{len(data)} bytes"
            raise InvalidSample(f"routed_experts: {size}, want int32 of the shape {shape}")
        if not shape or shape[0] != len(self.tokens_T) - 1:
            raise InvalidSample(
                f"routed_experts: shape {shape}, want a row per token but the last of {len(self.tokens_T)}"
            )


def _check_dtype(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    if values.dtype != dtype or values.ndim != 1:
        raise InvalidSample(f"{name}: {values.dtype} with {values.ndim} dimensions, want one of {dtype}")


def empty_sample(status: Status = Status.FAILED) -> Sample:
    """A sample without tokens: the row of a rollout that gave none."""
    return Sample(
        tokens_T=np.zeros(0, np.int32),
        response_length=0,
        loss_mask_R=np.zeros(0, np.int8),
        rollout_log_probs_R=np.zeros(0, np.float64),
        status=status,
    )
