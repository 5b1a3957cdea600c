"""What one check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` was looked at and what came of it; the `detail` of a failure says what to do."""

    state: State
    what: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(what: str, detail: str) -> Finding:
    return Finding("ok", what, _one_line(detail))


def warn(what: str, detail: str) -> Finding:
    return Finding("warn", what, _one_line(detail))


def fail(what: str, detail: str) -> Finding:
    return Finding("fail", what, _one_line(detail))


def _one_line(text: str) -> str:
    return " ".join(text.split())
