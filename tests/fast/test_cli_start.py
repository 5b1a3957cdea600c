"""What makes a command slow to start stays out of those that are to answer at once: these imports take a second."""

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = {"openai", "pandas", "prefect", "renderers", "torch", "transformers"}


@pytest.mark.parametrize("arguments", [["run", "--dry-run"], ["show"], ["parity", "mine"]], ids=" ".join)
def test_slow_imports_stay_out(arguments: list[str], tmp_path: Path):
    code = (
        "import sys, atexit\n"
        "from rollout.__main__ import main\n"
        f"atexit.register(lambda: print('slow:', sorted({SLOW!r} & set(sys.modules))))\n"
        f"sys.argv = ['rollout', *{arguments!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "slow: []" == done.stdout.splitlines()[-1], done.stderr
