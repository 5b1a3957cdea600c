"""Bodies as SDKs send them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollout.session.incoming import drop_parsed_arguments

CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}


def body(*calls: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": list(calls)}]}


@pytest.mark.parametrize("parsed", [None, {"a": 1}])
def test_what_the_sdks_stream_helper_adds_is_taken_off(parsed: Any) -> None:
    given = body({**CALL, "function": {**CALL["function"], "parsed_arguments": parsed}}, CALL)
    drop_parsed_arguments(given)
    assert body(CALL, CALL) == given


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        {"messages": 7},
        {"messages": [None, "a", {"tool_calls": "x"}, {"tool_calls": [7, {"function": "f"}, {}]}]},
        body(CALL),
    ],
)
def test_all_else_stays_for_the_checks_to_refuse(given: Any) -> None:
    before = copy.deepcopy(given)
    drop_parsed_arguments(given)
    assert before == given
