"""A shard against the fake session server: rows and tapes in order, slots kept, counts right, and its spool."""

import asyncio
from datetime import UTC, date, datetime

import pytest
from faulty_sessions import FaultySessions, serving
from lake_batch import plan_batch

from rollout.agents.contract import Agent
from rollout.agents.openai_client import close_connections, openai_client
from rollout.batch.shard import run_shard
from rollout.batch.spool import open_spool
from rollout.columns import SAMPLES_SCHEMA, BatchStamp, table_to_samples
from rollout.config import make_config
from rollout.errors import Failure
from rollout.generate import RunContext
from rollout.outcome import Outcome, RolloutInput
from rollout.parity.projections import payload_digest, same_rows
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


async def run(fake, given, *, slots=4, together=1, progress=None, spool=None, **options):
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
                run_shard(
                    given[size * k : size * (k + 1)], context=context, stamp=STAMP, progress=progress, spool=spool
                )
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


async def test_a_restarted_shard_has_its_refused_prompt_rows_once(tmp_path):
    """The spool of the killed run holds them already; a second row would keep the shard from being staged."""
    given = inputs(2)
    refused = [(given[1], Failure(type="bad_prompt", message="line 2: not JSON"))]
    plan = plan_batch()
    for runs in (1, 0):
        fake = FaultySessions()
        async with serving(fake), SessionClient(fake.url) as sessions:
            context = RunContext(
                config=make_config(agent="ask"),
                sessions=sessions,
                agents={"ask": Agent(name="ask", run=ask)},
                reward=None,
                engine={},
                slots=asyncio.Semaphore(1),
            )
            with open_spool(tmp_path, plan, 0) as spool:
                shard = await run_shard(given[:1], refused=refused, context=context, stamp=STAMP, spool=spool)
            await close_connections()
        assert runs == len(fake.sessions)
        assert [0, 1] == shard.samples["index"].to_pylist()


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


class Stopped(Exception):
    """Ends a shard in its middle."""


def stop_after(n):
    """A progress callback that ends the shard at its n-th rollout, and the indexes that it saw."""
    seen = []

    def progress(result):
        seen.append(result.outcome.input.index)
        if len(seen) == n:
            raise Stopped

    return progress, seen


async def stopped(spool, n, *, fake=None, **options):
    progress, seen = stop_after(n)
    with pytest.raises(ExceptionGroup) as caught:
        await run(fake or FaultySessions(), inputs(6), progress=progress, spool=spool, **options)
    assert caught.group_contains(Stopped)
    return seen


async def test_a_restarted_shard_runs_only_what_is_missing_and_gives_the_same_rows(tmp_path):
    (undisturbed,) = await run(FaultySessions(leaves=2), inputs(6))
    with open_spool(tmp_path, plan_batch(), 0) as spool:
        seen = await stopped(spool, 3, fake=FaultySessions(leaves=2))
    fake = FaultySessions(leaves=2)
    with open_spool(tmp_path, plan_batch(), 0) as spool:
        kept = {rows.index for rows in spool.rollouts}
        assert set(seen) <= kept  # and what finished at that very moment
        progress, again = stop_after(99)
        (shard,) = await run(fake, inputs(6), progress=progress, spool=spool)
    assert (6 - len(kept), set(range(6)) - kept) == (len(fake.sessions), set(again))
    assert [] == same_rows(undisturbed.samples, shard.samples)
    assert undisturbed.counts == shard.counts
    keys = ["index", "seq"]
    assert undisturbed.trajectories.select(keys) == shard.trajectories.select(keys)


async def test_a_finished_shard_that_was_not_staged_runs_nothing(tmp_path):
    with open_spool(tmp_path, plan_batch(), 0) as spool:
        (first,) = await run(FaultySessions(), inputs(3), spool=spool)
    fake = FaultySessions()
    with open_spool(tmp_path, plan_batch(), 0) as spool:
        (second,) = await run(fake, inputs(3), spool=spool)
    assert [] == fake.sessions and first.samples == second.samples and first.counts == second.counts


async def test_failures_of_the_agent_are_kept_those_of_engine_and_session_server_are_not(tmp_path):
    script = lambda session, request: {0: 502, 1: 502, 2: 500, 3: 429}.get(session)  # noqa: E731
    with open_spool(tmp_path, plan_batch(), 0) as spool:
        (shard,) = await run(FaultySessions(script=script), inputs(6), slots=1, max_attempts=2, spool=spool)
    assert {"engine_error": 1, "session_error": 1, "max_turns": 1} == shard.counts["failures"]
    with open_spool(tmp_path, plan_batch(), 0) as spool:
        assert [2, 3, 4, 5] == [rows.index for rows in spool.rollouts]
