"""One batch with an agent of each kind of misbehaviour: typed rows, nobody else touched, nothing left running."""

import json
import signal
import time
from pathlib import Path

import misbehaving_agents
import pytest
from installing import install

from rollout.lake import scan_samples
from rollout.lake.reading import scan_parity

KINDS = {
    # agent, or what the program of the agent `command` does: failure, turns kept
    "raises_at_once": ("agent_error", 0),
    "raises_after_turns": ("agent_error", 3),
    "hangs": ("deadline", 1),
    "swallows_its_end": ("deadline", 0),
    "blocks": ("deadline", 1),
    "blocks_plain": ("deadline", 1),
    "runs_busy": ("deadline", 0),
    "forks": (None, 1),
    "floods": (None, 1),
    "returns_junk": ("agent_error", 1),
    "makes_no_call": ("no_turns", 0),
    "exits": ("agent_error", 0),
    "lends_key": (None, 2),
    "steals_key": ("agent_error", 0),
    "program raises": ("agent_exit", 0),
    "program raises after turns": ("agent_exit", 3),
    "program hangs": ("deadline", 1),
    "program forks": (None, 1),
    "program floods": ("deadline", 1),
    "program returns junk": ("agent_error", 1),
    "program makes no call": ("no_turns", 0),
}
PROGRAM = r"""
import json, os, subprocess, sys, time
from urllib.request import Request, urlopen

row = json.load(sys.stdin)
does = row["metadata"]["does"]

def turn():
    body = json.dumps({"model": "m", "messages": row["messages"], **row["request_kwargs"]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    reply = json.load(urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)))
    row["messages"] += [reply["choices"][0]["message"], {"role": "user", "content": "More."}]

if does == "raises":
    sys.exit(3)
if does != "makes no call":
    turn()
if does == "raises after turns":
    turn(), turn()
    raise ValueError("after three turns")
if does == "forks":
    subprocess.Popen("sleep 3605 & setsid sleep 3606 & setsid setsid sleep 3607", shell=True)
    time.sleep(0.2)
if does == "hangs":
    subprocess.Popen(["setsid", "sleep", "3608"])
    time.sleep(3600)
if does == "floods":
    while True:
        print("flood " * 1000)
if does == "returns junk":
    open(os.environ["ROLLOUT_RESULT"], "w").write("no JSON")
"""
QUESTION = [{"role": "user", "content": "What is 4 + 3?"}]
FINE = {"messages": QUESTION, "label": "7", "agent": "single_turn", "metadata": {"does": "fine"}}


def prompt(kind):
    program = kind.removeprefix("program ")
    agent = "command" if program != kind else kind
    return {"messages": QUESTION, "label": "7", "agent": agent, "metadata": {"does": program}}


@pytest.fixture
def packaged(tmp_path, rollout):
    """The command with misbehaving_agents installed as a user's package."""
    agents = {name: name for name in [*KINDS, "waits_with_children"] if " " not in name}
    code = Path(misbehaving_agents.__file__).read_text()
    entries = {"rollout.agents": agents, "rollout.rewards": {"nan_reward": "nan_reward"}}
    rollout.environment = {"PYTHONPATH": str(install(tmp_path / "site", "misbehaving", code, entries))}
    return rollout


@pytest.mark.full
def test_every_kind_of_misbehaviour_is_a_typed_row_and_costs_nobody_else(packaged, tmp_path):
    # Each misdeed stands between two well-behaved rollouts of the same seed and prompt.
    lines = [FINE, *(row for kind in KINDS for row in (prompt(kind), FINE))]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--n-samples-per-prompt", 1, "--concurrency", 64, "--rollout-timeout-s", 12, "--temperature", 0]
    started = packaged.start(
        *("run", "--prompts", "prompts.jsonl", "--batch-id", "bad", "--agent-command", f"python3 {program}"),
        *(*options, "--max-failed-in-a-row", "none", "--json"),
    )
    done = started.wait()
    assert 0 == done.returncode, done.stderr
    assert [] == started.left_over()
    assert "published" == json.loads(done.stdout)["status"], "its output holds its answer and nothing else"
    rows = scan_samples(str(tmp_path / "lake"), batch="bad").sort("index").collect().to_dicts()
    assert list(range(len(lines))) == [row["index"] for row in rows]
    found = {kind: rows[2 * k + 1] for k, kind in enumerate(KINDS)}
    assert KINDS == {
        kind: (row["failure"]["type"] if row["failure"] else None, row["turns"]) for kind, row in found.items()
    }
    for kind, row in found.items():
        failed = KINDS[kind][0] is not None
        assert (failed, failed) == (row["remove_sample"], row["reward"] is None), kind
    fine = rows[::2]
    assert {(None, 1, False)} == {(row["failure"], row["turns"], row["remove_sample"]) for row in fine}
    assert 1 == len({(row["reward"], *row["tokens"]) for row in fine}) and fine[0]["reward"] is not None
    messages = {kind: row["failure"]["message"] for kind, row in found.items() if row["failure"]}
    for kind, words in {
        "raises_after_turns": "ValueError: after three turns",
        "blocks": "misbehaving.py:",
        "runs_busy": "in runs_busy",
        "returns_junk": "is not JSON",
        "exits": "SystemExit: enough",
        "steals_key": "401",
        "program raises": "exit code 3",
        "program raises after turns": "ValueError: after three turns",
        "program floods": "flood flood",
    }.items():
        assert words in messages[kind], (kind, messages[kind])
    verdicts = scan_parity(str(tmp_path / "lake"), batch="bad").collect()["verdict"].to_list()
    assert "differs" not in verdicts
    log = packaged.home / "logs" / "bad" / "agents.log"
    assert 2**20 < log.stat().st_size < 2**20 + 100 and log.read_bytes().endswith(b"more bytes were dropped\n")


def test_a_killed_batch_takes_along_what_its_agents_started(packaged, tmp_path):
    """kill -9 of the command's own process, while agents and programs have children and daemons."""
    kinds = ["program hangs", "waits_with_children"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(prompt(kind)) for kind in kinds))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = packaged.start(
        *("run", "--prompts", "prompts.jsonl", "--batch-id", "killed", "--agent-command", f"python3 {program}"),
        *("--n-samples-per-prompt", 1),
    )
    children = ("sleep 3608", "sleep 3609", "sleep 3610")
    end = time.monotonic() + 120
    while not all(any(child in line for line in started.processes()) for child in children):
        assert time.monotonic() < end and started.process.poll() is None
        time.sleep(0.1)
    started.end(signal.SIGKILL)
    assert [] == started.left_over()
