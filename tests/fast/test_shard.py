"""A shard against the fake session server: rows and tapes in order, slots kept, counts right."""

import asyncio
from datetime import UTC, date, datetime

import pytest
from faulty_sessions import FaultySessions, serving

from rollout.agents.contract import Agent
from rollout.agents.openai_client import close_connections, openai_client
from rollout.batch.shard import run_shard
from rollout.columns import SAMPLES_SCHEMA, BatchStamp, table_to_samples
from rollout.config import make_config
from rollout.errors import Failure
from rollout.generate import RunContext
from rollout.outcome import Outcome, RolloutInput
from rollout.parity.projections import payload_digest
from rollout.rewards import load_reward
from rollout.session.client import SessionClient
from rollout.session.tape import table_to_tape
from rollout.tape_columns import TRAJECTORIES_SCHEMA

STAMP = BatchStamp(
    batch_id="b", run_date=date(2026, 1, 1), shard=0, engine={"name": "e"}, created_at=datetime(2026, 1, 1, tzinfo=UTC)
)


async def ask(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    # Later inputs are quicker, so that rollouts finish in another order than they start.
    await asyncio.sleep(metadata["pause_s"])
    for _ in range(metadata["turns"]):
        client = openai_client(base_url, api_key)
        await client.chat.completions.create(model="m", messages=prompt)


def inputs(n, turns=lambda k: 1):
    return [
        RolloutInput(
            index=k,
            group_index=k // 2,
            messages=[{"role": "user", "content": str(k)}],
            label="4",
            metadata={"pause_s": 0.02 * (n - k), "turns": turns(k)},
            agent="ask",
        )
        for k in range(n)
    ]


async def run(fake, given, *, slots=4, together=1, progress=None, **options):
    config = make_config(**{"agent": "ask", "concurrency": slots, **options})
    async with serving(fake), SessionClient(fake.url) as sessions:
        context = RunContext(
            config=config,
            sessions=sessions,
            agents={"ask": Agent(name="ask", run=ask)},
            reward=load_reward("exact_answer"),
            engine={},
            slots=asyncio.Semaphore(slots),
        )
        size = len(given) // together
        try:
            shards = [
                run_shard(given[size * k : size * (k + 1)], context=context, stamp=STAMP, progress=progress)
                for k in range(together)
            ]
            return await asyncio.gather(*shards)
        finally:
            await close_connections()


async def test_rows_and_tapes_stand_in_order_whatever_finished_first():
    seen = []
    (shard,) = await run(FaultySessions(leaves=2), inputs(6)[::-1], progress=seen.append)
    assert (SAMPLES_SCHEMA, TRAJECTORIES_SCHEMA) == (shard.samples.schema, shard.trajectories.schema)
    rows = shard.samples.select(["group_index", "rollout_key", "sibling"]).to_pylist()
    assert [(k // 2, k, s) for k in range(6) for s in range(2)] == [tuple(row.values()) for row in rows]
    tape_rows = shard.trajectories.select(["index", "seq", "batch_id", "attempt", "schema_version"]).to_pylist()
    assert [(k, seq, "b", 0, 1) for k in range(6) for seq in (-1, 0)] == [tuple(row.values()) for row in tape_rows]
    assert set(range(6)) == {result.outcome.input.index for result in seen} and 6 == len(seen)


async def test_a_row_carries_its_digest_and_a_tape_its_outcome():
    (shard,) = await run(FaultySessions(), inputs(2))
    for sample, digest in zip(
        table_to_samples(shard.samples), shard.samples["payload_digest"].to_pylist(), strict=True
    ):
        assert payload_digest(sample) == digest
    tape, outcome = table_to_tape(shard.trajectories.slice(0, 2).select(TRAJECTORIES_SCHEMA.names[3:-1]))
    outcome = Outcome.from_json(outcome)
    assert (0, 1.0, 1) == (outcome.input.index, outcome.reward, len(tape.exchanges))


async def test_slots_belong_to_the_engine_not_to_the_shard():
    fake = FaultySessions()
    await run(fake, inputs(12), slots=3, together=2)
    assert (3, 0, 12) == (fake.most_running, fake.running, len(fake.sessions))


async def test_counts_are_by_status_and_by_failure():
    script = lambda session, request: 502 if session == 0 else None  # noqa: E731
    fake = FaultySessions(script=script, leaves=2)
    (shard,) = await run(fake, inputs(4, turns=lambda k: 0 if k == 3 else 2), slots=1)
    assert {
        "rollouts": {"completed": 3, "failed": 1},
        "samples": {"completed": 6, "failed": 1},
        "failures": {"no_turns": 1},
        "turns": 6,
        "tokens_sampled": 12,
        "engine_seconds": 1.5,
        "repeated": 1,
    } == shard.counts


async def test_a_rollout_without_a_tape_still_has_its_sessions_row():
    (shard,) = await run(FaultySessions(faults={"open": [500]}), inputs(2), slots=1)
    assert [0, 1, 1] == shard.trajectories["index"].to_pylist()
    tape, outcome = table_to_tape(shard.trajectories.slice(0, 1).select(TRAJECTORIES_SCHEMA.names[3:-1]))
    assert ("", [], "session_error") == (tape.session_id, tape.exchanges, outcome["failure"]["type"])
    assert ["failed", "completed"] == shard.samples["status"].to_pylist()


async def test_a_refused_prompt_row_gets_its_rows_without_a_session():
    fake, (first, second) = FaultySessions(), inputs(2)
    async with serving(fake), SessionClient(fake.url) as sessions:
        context = RunContext(
            config=make_config(agent="ask"),
            sessions=sessions,
            agents={"ask": Agent(name="ask", run=ask)},
            reward=None,
            engine={},
            slots=asyncio.Semaphore(1),
        )
        refused, seen = [(second, Failure(type="bad_prompt", message="line 2: not JSON"))], []
        shard = await run_shard([first], refused=refused, context=context, stamp=STAMP, progress=seen.append)
        await close_connections()
    assert (1, 2) == (len(fake.sessions), len(seen))
    assert ["completed", "failed"] == shard.samples["status"].to_pylist()
    assert {"type": "bad_prompt", "message": "line 2: not JSON"} == shard.samples["failure"][1].as_py()
    assert {"bad_prompt": 1} == shard.counts["failures"]


async def test_an_empty_shard_has_empty_tables_of_the_frozen_schemas():
    (shard,) = await run(FaultySessions(), [])
    assert (0, 0, SAMPLES_SCHEMA) == (shard.samples.num_rows, shard.trajectories.num_rows, shard.samples.schema)


async def test_a_cancelled_shard_leaves_no_session_and_no_slot_taken():
    fake = FaultySessions(script=lambda session, request: 30.0)
    task = asyncio.create_task(run(fake, inputs(4), slots=2))
    while len(fake.sessions) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (2, 0) == (len(fake.sessions), fake.running)
