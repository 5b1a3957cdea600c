"""The agent `command`: what a program is given, what it may leave behind, and that nothing of it stays."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout.agents.command import parse_command
from rollout.agents.contract import load_agent, load_agents, run_agent
from rollout.errors import BadConfig, RolloutFailure
from rollout.outcome import RolloutInput
from rollout.session.client import OpenedSession

SESSION = OpenedSession(session_id="s1", session_key="key", base_url="http://127.0.0.1:7/sessions/s1")
ROW = RolloutInput(
    index=0,
    group_index=0,
    messages=[{"role": "user", "content": "wie heißt 'das'?"}],
    tools=[{"x": 1}],
    label="4",
    metadata={"a": 1},
    agent="command",
)


@pytest.fixture
def play(tmp_path):
    """Runs a shell script as the agent."""

    async def run(script, *, timeout_s=20.0):
        path = tmp_path / "agent.sh"
        path.write_text(script)
        agent = load_agent("command", f"sh {path}")
        sampling = {"max_new_tokens": 8, "temperature": 0.5}
        return await run_agent(agent, ROW, SESSION, sampling=sampling, max_seq_len=None, timeout_s=timeout_s)

    return run


@pytest.fixture
def failing(play):
    async def run(script, **options):
        with pytest.raises(RolloutFailure) as caught:
            await play(script, **options)
        return caught.value.failure

    return run


def running(text):
    """Command lines of living processes with `text` in them."""
    lines = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if text in line and not line.startswith("Z")]


async def test_a_program_gets_row_addresses_and_keys_and_gives_its_result(play):
    script = """
cat > row.json
printf '{"reward": 0.5, "metadata": {"env": "%s %s %s %s", "pwd": "%s", "row": %s, "files": "%s"}}' \\
  "$OPENAI_BASE_URL" "$OPENAI_API_KEY" "$ANTHROPIC_BASE_URL" "$ANTHROPIC_API_KEY" "$PWD" "$(cat row.json)" \\
  "$(ls)" > "$ROLLOUT_RESULT"
"""
    result = await play(script)
    assert 0.5 == result["reward"]
    metadata = result["metadata"]
    assert f"{SESSION.base_url}/v1 key {SESSION.base_url} key" == metadata["env"]
    assert {
        "messages": ROW.messages,
        "tools": ROW.tools,
        "label": "4",
        "metadata": {"a": 1, "session_server_id": "127.0.0.1:7"},
        "request_kwargs": {"max_tokens": 8, "temperature": 0.5},
    } == metadata["row"]
    assert "row.json" == metadata["files"]
    assert not Path(metadata["pwd"]).exists()


async def test_no_result_file_is_no_result(play):
    assert await play("exit 0") is None


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("echo one; echo two >&2; exit 3", "agent_exit", "exit code 3: two"),
        ("echo only; exit 1", "agent_exit", "exit code 1: only"),
        ("exit 5", "agent_exit", "exit code 5: (silent)"),
        ("kill -SEGV $$", "agent_exit", "ended by signal 11"),
        ("exec timeout 0.1 sleep 65", "agent_timeout", "exit code 124"),
        ("echo junk > $ROLLOUT_RESULT", "agent_error", "JSONDecodeError"),
        ("echo [1] > $ROLLOUT_RESULT", "agent_error", "ValueError: the result file holds no JSON object but a list"),
        ("echo '{\"reward\": NaN}' > $ROLLOUT_RESULT", "agent_error", "ValueError: the agent's result is not JSON"),
        ("mkfifo $ROLLOUT_RESULT", "agent_error", "ValueError: the result is no file of 1048576 bytes"),
        ("ln -s /dev/zero $ROLLOUT_RESULT", "agent_error", "ValueError: the result is no file"),
        ("head -c 2000000 /dev/zero > $ROLLOUT_RESULT", "agent_error", "ValueError: the result is no file"),
    ],
)
async def test_whatever_a_program_does_is_a_typed_failure(failing, script, kind, message):
    found = await failing(script)
    assert kind == found.type
    assert found.message.startswith(message)


async def test_a_program_that_hangs_is_ended_at_the_deadline_with_its_group_and_its_last_words(failing):
    found = await failing("echo working >&2; sleep 66 & sleep 66", timeout_s=0.5)
    assert ("deadline", True) == (found.type, found.message.startswith("the agent was still running after 0.5 s"))
    assert "sh was ended; its last lines: working" in found.message
    assert [] == running("sleep 66")


async def test_a_program_that_ignores_sigterm_is_killed(failing):
    begun = time.monotonic()
    found = await failing("trap '' TERM; while :; do sleep 67; done", timeout_s=0.3)
    assert "deadline" == found.type and time.monotonic() - begun < 5
    assert [] == running("sleep 67")


async def test_children_and_daemons_that_a_program_leaves_behind_are_ended(play):
    await play("sleep 68 & setsid sleep 68 >/dev/null 2>&1 & (setsid sh -c 'setsid sleep 68 &' &) ; sleep 0.2")
    assert [] == running("sleep 68")


@pytest.mark.parametrize("stream", ["1", "2"])
async def test_a_flood_of_output_costs_neither_memory_nor_the_loops_time(failing, stream):
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    heart = asyncio.create_task(beat())
    found = await failing(f"yes 0123456789 >&{stream}", timeout_s=1.0)
    heart.cancel()
    assert "deadline" == found.type and "0123456789" in found.message
    assert len(found.message) <= 5000
    assert beats > 20
    assert [] == running("yes 0123456789")


async def test_a_cancelled_rollout_ends_its_program(play):
    task = asyncio.create_task(play("sleep 69"))
    while not running("sleep 69"):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [] == running("sleep 69")


def test_a_killed_worker_takes_the_program_along(tmp_path):
    code = f"""
import asyncio
from rollout.agents.contract import load_agent, run_agent
from rollout.outcome import RolloutInput
from rollout.session.client import OpenedSession
row = RolloutInput(index=0, group_index=0, messages=[])
session = OpenedSession(session_id="s", session_key="k", base_url={SESSION.base_url!r})
agent = load_agent("command", "sleep 70")
asyncio.run(run_agent(agent, row, session, sampling={{}}, max_seq_len=None, timeout_s=60))
"""
    worker = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 30
        while not running("sleep 70") or running("-c \nimport ctypes"):
            assert time.monotonic() < end
            time.sleep(0.02)
        worker.kill()
        worker.wait()
        time.sleep(0.2)
        assert [] == running("sleep 70")
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (None, "needs agent_command"),
        ("", "agent_command is empty"),
        ("sh 'open", "No closing quotation"),
        ("no-such-program-here --x", "no program 'no-such-program-here'"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_any_rollout(command, problem):
    with pytest.raises(BadConfig, match=problem):
        load_agents(["command"], "v2", command)


def test_a_command_line_is_split_as_a_shell_would_and_run_by_none(tmp_path, monkeypatch):
    program = tmp_path / "my agent"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert [str(program), "a b", "$HOME", "|", "x"] == parse_command("'./my agent' 'a b' $HOME | x")
