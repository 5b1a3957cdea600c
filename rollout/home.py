"""Where this machine keeps what is no batch's: logs of child processes, Prefect's state, spools, fetched models."""

from __future__ import annotations

import os
from pathlib import Path


def state_home() -> Path:
    """ROLLOUT_HOME, else a folder in XDG's state folder. Not created here."""
    if given := os.environ.get("ROLLOUT_HOME"):
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rollout-lake"
