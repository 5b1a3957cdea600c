"""A property as two tests: some cases in every run, thousands in the long suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings


def twice(check: Callable[..., None], *args: Any, fast: int, full: int, **kwargs: Any) -> tuple[Any, Any]:
    """`check` over what the strategies draw, `fast` times, and marked `full` as often as that says."""

    def made(n: int) -> Any:
        few = settings(max_examples=n, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        return few(given(*args, **kwargs)(check))

    return made(fast), pytest.mark.timeout(1800)(pytest.mark.full(made(full)))
