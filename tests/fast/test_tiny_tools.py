"""The tools: exact results, errors as text, nothing raised whatever the model writes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agents.tools import TOOLS, run_tool

TABLE = {"Oslo": 4, "apple": 12}


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", {"expression": "12 + 30"}, "42"),
        ("calculator", {"expression": "3-40"}, "-37"),
        ("calculator", {"expression": " 999 * 999 "}, "998001"),
        ("calculator", {"expression": "12 plus 30"}, "error: write it as a + b"),
        ("calculator", {"expression": "1 + 2 + 3"}, "error: write it as a + b"),
        ("calculator", {"expression": "1000 + 2"}, "error: three digits at most"),
        ("calculator", {"expression": 42}, "error: expression must be a string"),
        ("calculator", {"key": "1 + 1"}, "error: expression must be a string"),
        ("lookup", {"key": "Oslo"}, "4"),
        ("lookup", {"key": "oslo"}, "error: no entry, try Oslo"),
        ("lookup", {"key": "apples"}, "error: no entry, try apple"),
        ("lookup", {"key": "Rome"}, "error: no entry"),
        ("lookup", ["Oslo"], "error: key must be a string"),
        ("search", {"key": "Oslo"}, "error: no tool search"),
    ],
)
def test_each_call_gives_its_result_or_says_what_was_wrong(name, arguments, result):
    assert run_tool(name, json.dumps(arguments), TABLE) == result


def test_a_row_without_a_table_has_no_entries():
    assert run_tool("lookup", '{"key": "Oslo"}') == "error: no entry"


@given(
    st.sampled_from([tool["function"]["name"] for tool in TOOLS]) | st.text(),
    st.text() | st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)).map(json.dumps),
)
def test_no_call_raises(name, arguments):
    assert isinstance(run_tool(name, arguments, TABLE), str)


@given(st.integers(0, 999), st.sampled_from("+-*"), st.integers(0, 999))
def test_arithmetic_is_exact(a, operation, b):
    expected = {"+": a + b, "-": a - b, "*": a * b}[operation]
    assert run_tool("calculator", json.dumps({"expression": f"{a} {operation} {b}"})) == str(expected)
