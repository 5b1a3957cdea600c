"""One vocabulary of errors: typed, picklable, and turned into failures at the boundary."""

import asyncio
import inspect
import pickle

import pytest

from rollout import errors


def test_an_exception_inside_the_boundary_gets_its_type_and_one_line():
    with pytest.raises(errors.RolloutFailure) as caught, errors.boundary("agent_error"):
        raise RuntimeError("two\nlines")
    assert errors.Failure(type="agent_error", message="RuntimeError: two lines") == caught.value.failure


def test_the_innermost_boundary_wins():
    with (
        pytest.raises(errors.RolloutFailure) as caught,
        errors.boundary("agent_error"),
        errors.boundary("engine_error"),
    ):
        raise OSError("gone")
    assert caught.value.failure.type == "engine_error"


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt])
def test_cancellation_is_no_failure(kind):
    with pytest.raises(kind), errors.boundary("agent_error"):
        raise kind


def test_an_unknown_failure_type_is_refused():
    with pytest.raises(ValueError, match="unknown failure type 'oops'"):
        errors.Failure(type="oops", message="")  # type: ignore[arg-type]


def test_every_error_says_when_it_is_raised_and_survives_a_process_boundary():
    samples = {
        errors.SessionRefused: (409, "text"),
        errors.EngineRefused: (400, b"body"),
        errors.EngineFailed: (503, b"body"),
        errors.RolloutFailure: (errors.Failure(type="deadline", message="m"),),
    }
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(kind, errors.RolloutLakeError):
            continue
        assert kind.__doc__, name
        error = kind(*samples.get(kind, ("message",)))
        assert str(error) == str(pickle.loads(pickle.dumps(error)))
        assert name in (errors.__doc__ or ""), f"{name} is missing from the tree in the module docstring"
