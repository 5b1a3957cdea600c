"""kill -9 of the worker's session server while rollouts run: it comes back with its sessions, and none is lost."""

import asyncio
import json
import os
import signal
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from faulty_proxy import FaultyProxy

import rollout.batch
from rollout.agents.contract import load_agents
from rollout.batch import sessions as keeping
from rollout.batch.sessions import session_server
from rollout.batch.shard import run_shard
from rollout.columns import BatchStamp
from rollout.config import make_config
from rollout.engine.embedded import start_embedded
from rollout.engine.tiny import CHECKPOINT
from rollout.errors import SessionUnreachable
from rollout.generate import RunContext
from rollout.outcome import RolloutInput
from rollout.rewards import load_reward

STAMP = BatchStamp(
    batch_id="b", run_date=date(2026, 1, 1), shard=0, engine={}, created_at=datetime(2026, 1, 1, tzinfo=UTC)
)
DEMO = [json.loads(line) for line in Path(rollout.batch.__file__).with_name("demo.jsonl").read_text().splitlines()]
ROWS = [row for row in DEMO if row["agent"] == "tool_loop"][:4]
INPUTS = [
    RolloutInput(
        index=4 * group + k,
        group_index=group,
        **{name: row.get(name) for name in ("messages", "tools", "label", "metadata", "agent")},
    )
    for group, row in enumerate(ROWS)
    for k in range(4)
]


def server_pids(folder: Path) -> list[int]:
    """Session servers whose journal is in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:  # ended meanwhile
            continue
        if "rollout.session.server" in words and str(folder) in " ".join(words):
            found.append(int(path.parent.name))
    return found


@pytest.mark.full
async def test_no_rollout_is_lost_or_begun_again(tmp_path):
    child = await start_embedded(None, log=tmp_path / "engine.log")
    try:
        async with FaultyProxy(child.url).serving() as proxy:

            async def slow(request):
                await asyncio.sleep(0.2)

            proxy.fault = slow
            config = make_config(concurrency=4, reward="exact_answer")
            async with session_server(proxy.url, CHECKPOINT, config, log=tmp_path / "session.log") as sessions:
                context = RunContext(
                    config=config,
                    sessions=sessions,
                    agents=load_agents(["tool_loop"], "v2"),
                    reward=load_reward("exact_answer"),
                    engine={},
                    slots=asyncio.Semaphore(config.concurrency),
                )
                running = asyncio.create_task(run_shard(INPUTS, context=context, stamp=STAMP))
                killed = 0
                for n_calls in (6, 20):
                    while len(proxy.seen) < n_calls and not running.done():
                        await asyncio.sleep(0.01)
                    (pid,) = server_pids(tmp_path)
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                result = await running
    finally:
        child.stop()
    assert 2 == killed
    assert {} == result.counts["failures"]
    assert len(INPUTS) == sum(result.counts["rollouts"].values())
    assert 0 == result.counts["repeated"], "a rollout had to take another attempt"
    events = [json.loads(line) for line in (tmp_path / "session.log").read_text().splitlines()]
    assert "restored" in {event["event"] for event in events}
    assert not list(tmp_path.glob("sessions-*"))


async def test_a_server_that_dies_again_and_again_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "MAX_RESTARTS", 1)
    async with session_server(
        "http://127.0.0.1:9", CHECKPOINT, make_config(), log=tmp_path / "session.log"
    ) as sessions:
        for _ in range(2):
            async with asyncio.timeout(60):
                opened = await sessions.open({})
                await sessions.delete(opened.session_id)
                (pid,) = server_pids(tmp_path)
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SessionUnreachable):
            await sessions.open({})
