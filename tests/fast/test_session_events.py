"""Events as lines: JSON or text, whatever they carry, and a log that cannot be written stops nothing."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from rollout.errors import BadConfig, EngineFailed, SessionRefused
from rollout.session.events import TEXT_LIMIT, EventLog, _Records, text_of
from rollout.session.options import ServerOptions, read_options


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_an_event_is_one_json_object_per_line_where_no_terminal_reads(pipe: tuple[int, int]) -> None:
    EventLog("auto", pipe[1]).write("turn", session_id="s", n_prompt=3, ms=0.5)
    EventLog("auto", pipe[1]).write("refused", level="warning", text="a\nb")
    first, second = (json.loads(line) for line in os.read(pipe[0], 9999).splitlines())
    assert first.pop("ts").endswith("Z")
    assert {"level": "info", "event": "turn", "session_id": "s", "n_prompt": 3, "ms": 0.5} == first
    assert ("warning", "a\nb") == (second["level"], second["text"])


def test_text_is_time_level_event_and_fields(pipe: tuple[int, int]) -> None:
    EventLog("text", pipe[1]).write("turn", session_id="s", n_prompt=3)
    line = os.read(pipe[0], 9999).decode()
    assert line.endswith("Z INFO turn session_id=s n_prompt=3\n")


def test_a_log_that_is_gone_stops_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    EventLog("json", writer).write("turn")


def test_a_refusal_is_logged_without_what_it_quotes() -> None:
    assert "role='...' not allowed" == text_of(SessionRefused(400, "role='it''s secret' not allowed"))
    assert TEXT_LIMIT == len(text_of(SessionRefused(400, "x" * 999)))
    caused = SessionRefused(500, "the matcher raised: secret")
    caused.__cause__ = ValueError("secret")
    assert "the matcher raised" == text_of(caused)
    caused.__cause__ = EngineFailed(503, b"secret")
    assert "the engine answered 503" == text_of(caused)


def test_a_line_that_is_no_http_is_logged_without_its_words(pipe: tuple[int, int]) -> None:
    logger = logging.Logger("aiohttp.server")
    logger.addHandler(_Records(EventLog("json", pipe[1])))
    try:
        raise BadHttpMessage("Invalid header value char: Authorization: Bearer sk-secret")
    except BadHttpMessage as error:
        logger.error("Error handling request from %s", "127.0.0.1", exc_info=error)
    written = os.read(pipe[0], 9999)
    assert b"Error handling request from 127.0.0.1: BadHttpMessage" in written
    assert b"sk-secret" not in written


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--idle-s", "0"], "idle_s"),
        (["--idle-s", "nan"], "idle_s"),
        (["--keepalive-s", "-1"], "keepalive_s"),
        (["--max-sessions", "0"], "max_sessions"),
        (["--log-format", "xml"], "log_format"),
        (["--host", "0.0.0.0"], "host"),
        (["--driver-token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
)
def test_options_out_of_bounds_are_named(options: list[str], text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        read_options(["--engine", "http://e", "--tokenizer", "t", *options], about=None)


def test_options_that_are_not_given_are_the_defaults() -> None:
    given = read_options(["--engine", "http://e", "--tokenizer", "t"], about=None)
    assert ServerOptions(engine="http://e", tokenizer=given.tokenizer) == given
    assert given.keepalive_s < 15.0, "a streaming client has its first byte within 15 s"
    assert 3600.0 == given.idle_s
