"""Every error of the project, in one vocabulary.

RolloutLakeError
├── BadInput (ValueError)        the user can mend it: CLI exit code 2, raised before work starts
│   ├── BadPrompts               prompt file or row
│   ├── BadConfig                a parameter, or a batch id that was planned with another configuration
│   ├── UnknownPart              agent, reward, picker, finisher or matcher that is not installed
│   ├── BadCheckpoint            a model directory that cannot be loaded
│   ├── EngineMismatch           engines that must serve the same do not
│   ├── BadLake                  a lake path that is not writable or holds something else
│   ├── PortInUse                a server cannot bind
│   ├── NoSGLang                 no Python environment with SGLang is at hand
│   ├── EngineInUse              this host's engines serve another model, or with other flags
│   └── BatchClosed              the batch is quarantined or discarded
├── SessionRefused               a request that a session server refuses (HTTP status and text)
├── SessionUnreachable           the session server gave no answer
├── CannotRestore                a journaled session does not come out again as it was recorded
├── EngineError                  the engine failed, is gone, or answered nonsense
│   ├── EngineUnreachable        no connection to the engine: it has seen nothing of the request
│   ├── EngineRefused            the engine answered 4xx: the request's fault, never the engine's
│   └── EngineFailed             the engine answered 5xx: a repeat may help
├── FailedInARow                 max_failed_in_a_row rollouts failed one after another
├── ShardLost                    the machines that ran a shard were lost, or would not run it
├── CanaryFailed                 a batch's first groups did not go well, so the rest was not started
├── StagedChanged                a staged file no longer has its manifest's digest
├── BatchIncomplete              planned shards are missing
├── ParityFailed                 a rollout differs, or too few are equal: the batch is quarantined
├── PublishFailed                a commit could not be made or its outcome not be learnt
└── RolloutFailure               inside one rollout; becomes the `failure` of its rows, never a crash
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

FailureType = Literal[
    "agent_error",
    "agent_timeout",
    "agent_exit",
    "engine_error",
    "session_error",
    "reward_error",
    "no_turns",
    "all_truncated",
    "max_turns",
    "deadline",
    "bad_prompt",
]
"""What can be wrong with a rollout: the values of the lake's `failure.type`."""

FAILURE_TYPES: tuple[str, ...] = get_args(FailureType)

MESSAGE_LIMIT = 2000
"""Characters of a failure message that are kept in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A rollout's typed failure as its rows carry it."""

    type: FailureType
    message: str

    def __post_init__(self) -> None:
        if self.type not in FAILURE_TYPES:
            raise ValueError(f"unknown failure type {self.type!r}: one of {', '.join(FAILURE_TYPES)}")


class RolloutLakeError(Exception):
    """Base of all errors that this project raises on purpose."""


class BadInput(RolloutLakeError, ValueError):
    """Something the user gave is wrong; the message says what to change. CLI exit code 2."""


class BadPrompts(BadInput):
    """A prompt file cannot be read, is empty, or has a row that is refused; names file and line."""


class BadConfig(BadInput):
    """A parameter is out of bounds, or a batch id is reused with another configuration."""


class UnknownPart(BadInput):
    """An agent, reward, picker, finisher or matcher that is not installed or not allowed."""


class BadCheckpoint(BadInput):
    """A model directory is missing, incomplete or of an architecture that cannot be loaded."""


class EngineMismatch(BadInput):
    """Engines differ that must not: those of one batch, or one to compare with whose vocabulary is another."""


class BadLake(BadInput):
    """The lake path is not writable, or holds files that are not a lake's."""


class PortInUse(BadInput):
    """A server cannot bind its port; choose another or 0."""


class NoSGLang(BadInput):
    """No Python environment with SGLang is at hand; `make sglang-cpu` builds one for CPUs."""


class EngineInUse(BadInput):
    """The engines of this host are used with another model or other flags; wait for their batch, or do as it does."""


class BatchClosed(BadInput):
    """The batch was quarantined or discarded; `release` or `discard` decide about it."""


class SessionRefused(RolloutLakeError):
    """A session server's refusal: HTTP `status`, OpenAI error `type` and `code`, and whether a repeat may help."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, retry: bool = False, engine: bool = False
    ) -> None:
        """`engine`: the status is the engine's own, passed on."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry = retry
        self.engine = engine

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_refusal, (self.status, self.message, self.code, self.retry, self.engine))


def _rebuild_refusal(status: int, message: str, code: str | None, retry: bool, engine: bool) -> SessionRefused:
    return SessionRefused(status, message, code=code, retry=retry, engine=engine)


class SessionUnreachable(RolloutLakeError):
    """A session server did not answer, or broke off; another attempt may help once it is back."""


class CannotRestore(RolloutLakeError):
    """A recorded session does not come out again as it was recorded: another tokenizer, renderer or matcher."""


class EngineError(RolloutLakeError):
    """The engine failed, cannot be reached, or answered what its contract forbids; another attempt may help."""


class EngineUnreachable(EngineError):
    """No connection to the engine could be made, so it has begun nothing; the request may go elsewhere, or again."""


class EngineRefused(EngineError):
    """The engine answered with a 4xx of its own; repeating the same request cannot help."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the engine refused with {status}: {body[:300].decode(errors='replace')}")
        self.status = status
        self.body = body

    def __reduce__(self) -> tuple[object, ...]:
        return (EngineRefused, (self.status, self.body))


class FailedInARow(RolloutLakeError):
    """So many rollouts failed one after another that the batch ends early; it can be gone on with."""


class ShardLost(RolloutLakeError):
    """A shard that ran apart came to no end: its machines were lost or would not run it; the batch can go on."""


class CanaryFailed(RolloutLakeError):
    """The first groups of a batch did not go well, so its other rollouts were not started; it can be gone on with."""


class EngineFailed(EngineError):
    """The engine answered with a 5xx of its own; a repeat of the same request may help."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the engine answered {status}: {body[:300].decode(errors='replace')}")
        self.status = status
        self.body = body

    def __reduce__(self) -> tuple[object, ...]:
        return (EngineFailed, (self.status, self.body))


class StagedChanged(RolloutLakeError):
    """A staged file is missing or differs from its manifest's digest; nothing of the batch is published."""


class BatchIncomplete(RolloutLakeError):
    """Planned shards are not staged yet; run the batch again with the same batch id to go on."""


class ParityFailed(RolloutLakeError):
    """The replay of a batch differs, or too few rollouts are equal; the batch went to quarantine."""


class PublishFailed(RolloutLakeError):
    """A Delta commit could not be made; publishing again is safe."""


class RolloutFailure(RolloutLakeError):
    """Ends one rollout with a typed failure; `generate` turns it into the rows' `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.type}: {failure.message}")
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        return (RolloutFailure, (self.failure,))


def describe(error: BaseException) -> str:
    """One line for a row or a log: type and text of `error`, cut to MESSAGE_LIMIT characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MESSAGE_LIMIT] if text else type(error).__name__


@contextmanager
def boundary(kind: FailureType) -> Iterator[None]:
    """Turn any exception that leaves this block into a RolloutFailure of `kind`.

    Failures that already have a type pass unchanged; so do cancellation and exits, which are
    no statement about the rollout.
    """
    try:
        yield
    except RolloutFailure:
        raise
    except Exception as error:
        raise RolloutFailure(Failure(type=kind, message=describe(error))) from error
