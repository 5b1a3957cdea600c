"""What a session server is started with: one object for the process, its command line and the application."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollout.engine.urls import read_urls
from rollout.errors import BadConfig
from rollout.session.matching import find_matcher

LogFormat = Literal["auto", "json", "text"]

MAX_SESSIONS = 10_000
"""Sessions at once, at most, unless the server is told otherwise."""
KEEPALIVE_S = 10.0
"""Seconds between the comments that a streaming client gets while it waits for its answer."""
IDLE_S = 3600.0
"""Seconds after which a session that nobody uses expires."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """A session server's options, checked.

    engine         URL of what answers /generate, or those of several with commas between them
    tokenizer      checkpoint directory with tokenizer.json
    driver_token   None checks nothing and binds loopback only
    shadow_matcher a matcher that is asked beside a session's own and only counted; None asks none
    max_sessions   one more is refused with 429
    keepalive_s    seconds between the comments that a streaming client gets while it waits
    idle_s         a session that is not used for so many seconds expires
    journal        folder in which every committed turn is kept, to go on from after a crash; None keeps nothing
    log_format     of the events on stderr; auto: text on a terminal, else JSON

    Raises:
        BadConfig: an option out of bounds, another host than loopback without a driver's token, or no engine's URL.
        UnknownPart: a shadow matcher that is not installed.
    """

    engine: str
    tokenizer: Path
    host: str = "127.0.0.1"
    port: int = 0
    renderer: str = "qwen3"
    driver_token: str | None = None
    enable_thinking: bool = False
    shadow_matcher: str | None = None
    max_sessions: int = MAX_SESSIONS
    keepalive_s: float = KEEPALIVE_S
    idle_s: float = IDLE_S
    journal: Path | None = None
    log_format: LogFormat = "auto"

    def __post_init__(self) -> None:
        if self.driver_token is None and not _is_loopback(self.host):
            raise BadConfig(f"host {self.host}: without a driver's token only loopback is served")
        if self.max_sessions < 1:
            raise BadConfig(f"max_sessions {self.max_sessions}: want at least 1")
        for name in ("keepalive_s", "idle_s"):
            if not getattr(self, name) > 0:
                raise BadConfig(f"{name} {getattr(self, name)}: want more than 0")
        if self.log_format not in ("auto", "json", "text"):
            raise BadConfig(f"log_format {self.log_format}: want auto, json or text")
        if self.shadow_matcher is not None:
            find_matcher(self.shadow_matcher)
        read_urls(self.engine)

    @property
    def engines(self) -> list[str]:
        """Their URLs, in the order given."""
        return read_urls(self.engine)


def read_options(argv: Sequence[str] | None, *, about: str | None) -> ServerOptions:
    """The options on a command line; argparse ends the process with 2 for what it cannot read.

    Raises:
        BadConfig: as ServerOptions; or the environment lacks the driver's token.
    """
    parser = argparse.ArgumentParser(prog="rollout.session.server", description=about)
    parser.add_argument(
        "--engine", required=True, action="append", help="URL of an engine (SGLang's /generate); once for each"
    )
    parser.add_argument("--tokenizer", required=True, type=Path, help="checkpoint directory with tokenizer.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port, told in the ready line")
    parser.add_argument("--renderer", default="qwen3", help="chat format, by its name in `renderers`")
    parser.add_argument("--enable-thinking", action="store_true", help="sessions think unless they say otherwise")
    parser.add_argument("--shadow-matcher", help="a matcher that is asked beside each session's own, and counted")
    parser.add_argument("--max-sessions", type=int, default=MAX_SESSIONS, help="sessions at once, at most")
    parser.add_argument("--keepalive-s", type=float, default=KEEPALIVE_S, help="seconds between comments in a stream")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="seconds until a session that nobody uses expires")
    parser.add_argument("--journal", type=Path, help="folder to keep every turn in, and to go on from after a crash")
    parser.add_argument("--log-format", default="auto", help="auto (text on a terminal, else json), json or text")
    parser.add_argument("--driver-token-env", help="name of the environment variable with the driver's token")
    given = vars(parser.parse_args(argv))
    token, engine = read_token(given.pop("driver_token_env")), ",".join(given.pop("engine"))
    return ServerOptions(**given, engine=engine, driver_token=token)


def read_token(variable: str | None) -> str | None:
    """The driver's token from an environment variable; None without one.

    Raises:
        BadConfig: the environment does not have it.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise BadConfig(f"--driver-token-env: the environment has no {variable}")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
