import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from strategies import json_values

from rollout.batch.prompts import parse_prompts, prompt_bytes, read_prompts
from rollout.errors import BadInput, BadPrompts

USER = {"role": "user", "content": "hi"}
GOOD = json.dumps({"messages": [USER]})


def parse(*lines, **options):
    return parse_prompts("\n".join(lines).encode(), "p.jsonl", **options)


def refusal(row):
    """The refusal of `row` as second line of a file."""
    line = row if isinstance(row, str | bytes) else json.dumps(row)
    data = GOOD.encode() + b"\n" + (line if isinstance(line, bytes) else line.encode())
    with pytest.raises(BadPrompts) as caught:
        parse_prompts(data, "p.jsonl")
    message = str(caught.value)
    assert message.startswith("p.jsonl, line 2: ") and "\n" not in message
    return message.removeprefix("p.jsonl, line 2: ")


def test_a_full_row_is_read_as_it_stands():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    row = {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {**USER, "name": "bob"}],
        "tools": [tool],
        "label": "42",
        "metadata": {"k": [1, None, 0.1]},
        "agent": "tool_loop",
        "rollout_id": 0,
    }
    (found,) = parse(json.dumps(row))
    assert found.line == 1 and found.refused is None
    for key, value in row.items():
        assert getattr(found, key) == value


def test_absent_and_null_options_are_the_same():
    nulls = json.dumps({"messages": [USER], **dict.fromkeys(["tools", "label", "metadata", "agent", "rollout_id"])})
    for row in parse(GOOD, nulls):
        assert (None, None, {}, None, None) == (row.tools, row.label, row.metadata, row.agent, row.rollout_id)


@pytest.mark.parametrize(
    ("label", "text"),
    [("x y", "x y"), ("ü50%", "ü50%"), ("", ""), (42, "42"), (True, "true"), (0.5, "0.5"), ([1, "a"], '[1,"a"]')],
)
def test_a_label_is_text_and_any_other_value_its_json(label, text):
    """G53 for labels: they come back unchanged."""
    assert text == parse(json.dumps({"messages": [USER], "label": label}))[0].label


def test_lines_count_from_one_and_blank_ones_are_passed_over():
    rows = parse("", GOOD, "  ", GOOD, "")
    assert [2, 4] == [row.line for row in rows]
    assert rows[0].digest == rows[1].digest


def test_windows_line_ends_a_bom_and_u2028_are_no_trouble():
    tricky = json.dumps({"messages": [{"role": "user", "content": "a\u2028b"}]}, ensure_ascii=False)
    rows = parse_prompts(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n" + tricky.encode() + b"\r\n", "p")
    assert ["hi", "a\u2028b"] == [row.messages[0]["content"] for row in rows]


def test_the_digest_is_over_the_exact_bytes():
    spaced = GOOD.replace(": ", ":  ")
    first, second, third = parse(GOOD, spaced, GOOD)
    assert first.digest == third.digest != second.digest


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at character 2"),
        (b'{"messages": "\xff"}', "not UTF-8: byte 14"),
        ("[1]", "list where an object is wanted"),
        ("null", "null where an object is wanted"),
        ("[" * 100_000, "nested too deeply"),
        ({"messages": [USER], "mesages": 1, "id": 2}, "unknown key 'mesages', 'id'; known are messages, tools,"),
        ('{"messages": [], "messages": []}', "key 'messages' stands twice in one object"),
        ({}, "messages is missing"),
        ({"messages": None}, "messages is missing"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages is text, want a list of messages"),
        ({"messages": {"role": "user"}}, "messages is an object, want a list"),
        ({"messages": ["oops"]}, "messages[0] is text, want an object"),
        ({"messages": [USER, None]}, "messages[1] is null, want an object"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content is a number, want text"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content is an object, want text"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content is missing"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing or no text"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role is missing or no text"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role is 'usr', want one of system,"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] is no text part",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0] has no function"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls is a number"),
        ({"messages": [USER], "tools": {}}, "tools is an object, want a list of tools"),
        ({"messages": [USER], "tools": [{"name": "f"}]}, "tools[0] is no function with a name"),
        ({"messages": [USER], "metadata": [1]}, "metadata is a list, want an object"),
        ({"messages": [USER], "agent": 1}, "agent is a number, want the name of an agent"),
        ({"messages": [USER], "agent": ""}, "agent is empty"),
        ({"messages": [USER], "rollout_id": -1}, "rollout_id -1 is not within 0..2^63-1"),
        ({"messages": [USER], "rollout_id": 2**63}, f"rollout_id {2**63} is not within"),
        ({"messages": [USER], "rollout_id": True}, "rollout_id is a boolean, want an integer"),
        ({"messages": [USER], "rollout_id": 1.0}, "rollout_id is a number, want an integer"),
        ({"messages": [USER], "rollout_id": "1"}, "rollout_id is text, want an integer"),
        (
            {"messages": [{"role": "user", "content": "a\ud800"}]},
            "messages[0].content has a lone surrogate at character 2",
        ),
        ({"messages": [USER], "metadata": {"\udfff": 1}}, "metadata has a lone surrogate"),
        ({"messages": [USER], "label": "\ud800"}, "label has a lone surrogate"),
        ('{"messages": [{"role": "user", "content": "x"}], "label": NaN}', "NaN is no JSON number"),
        ('{"messages": [{"role": "user", "content": "x"}], "label": 1e999}', "label is beyond a double"),
        ({"messages": [USER], "metadata": {"n": 2**64}}, "metadata.n is beyond 64 bits"),
        (f'{{"messages": [{{"role": "user", "content": "x"}}], "rollout_id": {"1" * 5000}}}', "an integer is beyond"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "label": ' + "[" * 120 + "]" * 120 + "}",
            "nested more than",
        ),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_place(row, problem):
    """G25, G57 and every other way to be wrong."""
    assert refusal(row).startswith(problem)


def test_one_bad_row_among_a_thousand_is_named_or_recorded():
    """G25."""
    lines = [GOOD] * 999
    lines.insert(500, json.dumps({"label": "x"}))
    with pytest.raises(BadPrompts, match=r"p\.jsonl, line 501: messages is missing"):
        parse(*lines)
    rows = parse(*lines, skip_bad=True)
    assert 1000 == len(rows)
    assert [(501, "line 501: messages is missing")] == [(r.line, r.refused) for r in rows if r.refused is not None]


def test_a_file_that_gives_nothing_to_run_is_refused_even_with_skip_bad():
    for data in (b"", b"\n \n"):
        with pytest.raises(BadPrompts, match="p: no prompts in it"):
            parse_prompts(data, "p", skip_bad=True)
    with pytest.raises(BadPrompts, match="p: every row is refused, the first because of line 1: not JSON"):
        parse_prompts(b"{\n[]", "p", skip_bad=True)


def test_an_unreadable_file_is_one_line(tmp_path):
    cases = [(tmp_path / "none", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "embedded null byte")]
    for path, reason in cases:
        with pytest.raises(BadPrompts, match=reason) as caught:
            read_prompts(path)
        assert isinstance(caught.value, BadInput) and "\n" not in str(caught.value)


def test_a_path_in_the_users_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.jsonl").write_bytes(b"{}")
    assert b"{}" == prompt_bytes("~/p.jsonl")


@given(value=json_values)
def test_any_json_survives_as_metadata(value):
    line = json.dumps({"messages": [USER], "metadata": {"v": value}}, ensure_ascii=False)
    assert json.dumps(value) == json.dumps(parse(line)[0].metadata["v"])


# Parquet


def write(tmp_path, columns):
    path = tmp_path / "prompts"  # found by its content, not by its name
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_with_nested_columns_drops_the_nulls_that_arrow_adds(tmp_path):
    messages = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, USER],
    ]
    path = write(tmp_path, {"messages": messages, "label": [1, None], "rollout_id": pa.array([5, None], pa.int32())})
    rows = read_prompts(path)
    assert messages == [row.messages for row in rows]
    assert [("1", 5), (None, None)] == [(row.label, row.rollout_id) for row in rows]
    assert [1, 2] == [row.line for row in rows]
    assert rows[0].digest != rows[1].digest


def test_parquet_with_json_text_gives_the_same_rows(tmp_path):
    path = write(tmp_path, {"messages": [json.dumps([USER])], "metadata": ['{"a": null}'], "agent": ["tool_loop"]})
    (row,) = read_prompts(path)
    assert ([USER], {"a": None}, "tool_loop") == (row.messages, row.metadata, row.agent)


def test_bad_parquet_rows_and_columns_are_named(tmp_path):
    with pytest.raises(BadPrompts, match="row 2: messages is missing"):
        read_prompts(write(tmp_path, {"messages": [[USER], None]}))
    with pytest.raises(BadPrompts, match="row 1: not JSON"):
        read_prompts(write(tmp_path, {"messages": ['[], "agent": "x"']}))
    with pytest.raises(BadPrompts, match="unknown column prompt; known are messages"):
        read_prompts(write(tmp_path, {"messages": [[USER]], "prompt": ["x"]}), skip_bad=True)
    with pytest.raises(BadPrompts, match=r"row 1: metadata.day is date, no JSON value"):
        days = pa.array([{"day": 1}], pa.struct([("day", pa.date32())]))
        read_prompts(write(tmp_path, {"messages": [[USER]], "metadata": days}))
    with pytest.raises(BadPrompts, match="row 1: label is beyond a double"):
        read_prompts(write(tmp_path, {"messages": [[USER]], "label": [float("nan")]}))
    with pytest.raises(BadPrompts, match="cannot be read as parquet"):
        parse_prompts(b"PAR1" + b"x" * 20, "p")


def test_parquet_values_that_python_cannot_hold_are_one_line(tmp_path):
    """Arrow raises the built-in errors here, not its own."""
    not_utf8 = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    late = pa.array([{"day": 2**30}], pa.struct([("day", pa.date32())]))
    messages = pa.array([json.dumps([USER])])
    tables = [
        {"messages": messages, "label": not_utf8},
        {"messages": messages, "metadata": twice},
        {"messages": messages, "metadata": late},
    ]
    for columns in tables:
        with pytest.raises(BadPrompts, match="cannot be read as parquet") as caught:
            read_prompts(write(tmp_path, columns))
        assert "\n" not in str(caught.value)
    pq.write_table(pa.table([messages, messages], names=["messages", "messages"]), tmp_path / "twice")
    with pytest.raises(BadPrompts, match="a column stands twice: messages, messages"):
        read_prompts(tmp_path / "twice")


def test_prompt_bytes_are_the_files_own(tmp_path):
    (tmp_path / "p").write_bytes(b"\xef\xbb\xbf{}\n")
    assert b"\xef\xbb\xbf{}\n" == prompt_bytes(tmp_path / "p")
