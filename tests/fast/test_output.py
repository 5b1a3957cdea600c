"""What agents print: kept in a log as far as it has room, whoever still holds the pipe."""

import os
import subprocess
import sys
from pathlib import Path

from rollout.batch.output import KEPT_BYTES, contained_output

HOLDER = "import sys; sys.stdin.read(); print('late', flush=True)"


def test_the_log_is_whole_when_the_block_ends_though_a_child_lives_on(tmp_path: Path):
    log = tmp_path / "logs" / "agents.log"
    with contained_output(log):
        child = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE)
        os.write(1, b"one line\n")
    assert b"one line\n" == log.read_bytes()
    child.communicate()
    assert 0 == child.returncode  # its print neither blocked nor broke
    assert b"one line\n" == log.read_bytes()


def test_a_flood_is_cut_and_counted(tmp_path: Path):
    log = tmp_path / "agents.log"
    with contained_output(log):
        for _ in range(KEPT_BYTES // 1000 + 2):
            os.write(1, b"x" * 1000)
    text = log.read_bytes()
    dropped = (KEPT_BYTES // 1000 + 2) * 1000 - KEPT_BYTES
    assert b"x" * KEPT_BYTES == text[:KEPT_BYTES]
    assert f"\n... {dropped} more bytes were dropped\n".encode() == text[KEPT_BYTES:]


def test_descriptor_1_is_what_it_was_again(tmp_path: Path):
    read, write = os.pipe()
    saved = os.dup(1)
    try:
        os.dup2(write, 1)
        with contained_output(tmp_path / "agents.log"):
            os.write(1, b"inside")
        os.write(1, b"outside")
    finally:
        os.dup2(saved, 1)
        for one in (saved, write):
            os.close(one)
    with os.fdopen(read, "rb") as pipe:
        assert b"outside" == pipe.read()
