"""One process of a range of session servers, as rollout.session.fleet starts it.

python -m rollout.session.member JSON: its options, its place, and the number of the bound socket it
inherits. The driver's token comes in the environment, where no process list shows it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollout.errors import BadInput
from rollout.session.options import ServerOptions
from rollout.session.routing import Place
from rollout.session.server import serve

TOKEN_VARIABLE = "ROLLOUT_SESSION_DRIVER_TOKEN"
_PATHS = ("tokenizer", "journal")


def member_argv(options: ServerOptions, place: Place, fd: int) -> list[str]:
    """The command of one process."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    del given["driver_token"]
    facts = {"options": given, "place": asdict(place), "fd": fd}
    return [sys.executable, "-m", "rollout.session.member", json.dumps(facts)]


def read_member(text: str, token: str | None) -> tuple[ServerOptions, Place, int]:
    """What member_argv was given. Each process keeps its journal in a folder of its own."""
    facts: dict[str, Any] = json.loads(text)
    given, place = facts["options"], Place(**facts["place"])
    paths = {name: Path(given[name]) for name in _PATHS if given.get(name) is not None}
    options = ServerOptions(**{**given, **paths}, driver_token=token)
    if options.journal is not None:
        options = replace(options, journal=options.journal / f"process-{place.slot}")
    return options, place, facts["fd"]


def main() -> int:
    """Serve until told to end; 2 for bad input, with one line on stderr."""
    try:
        options, place, fd = read_member(sys.argv[1], os.environ.get(TOKEN_VARIABLE))
        serve(options, place=place, bound=socket.socket(fileno=fd))
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
