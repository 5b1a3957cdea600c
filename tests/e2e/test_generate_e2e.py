"""Rollouts with the real agents, session server and embedded engine: rows, leaves, failures, and that they repeat."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

import rollout.batch
from rollout.agents.contract import Agent, load_agents
from rollout.agents.openai_client import openai_client
from rollout.batch.sessions import session_server
from rollout.batch.shard import run_shard
from rollout.columns import BatchStamp, table_to_samples
from rollout.config import make_config
from rollout.engine.embedded import start_embedded
from rollout.engine.tiny import CHECKPOINT
from rollout.engine.tiny.tasks import TOOL_KINDS
from rollout.generate import RunContext
from rollout.outcome import RolloutInput
from rollout.parity.projections import same_rows
from rollout.rewards import load_reward

STAMP = BatchStamp(
    batch_id="b",
    run_date=date(2026, 1, 1),
    shard=0,
    engine={"name": "embedded"},
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)
DEMO = [json.loads(line) for line in Path(rollout.batch.__file__).with_name("demo.jsonl").read_text().splitlines()]


def inputs(rows, n_samples=1):
    """The first `rows` shipped rows of each agent, `n_samples` rollouts of each."""
    names = ("single_turn", "tool_loop", "branching")
    chosen = [row for name in names for row in [row for row in DEMO if row["agent"] == name][:rows]]
    return [
        RolloutInput(
            index=group * n_samples + k,
            group_index=group,
            **{key: row.get(key) for key in ("messages", "tools", "label", "metadata", "agent")},
        )
        for group, row in enumerate(chosen)
        for k in range(n_samples)
    ]


@asynccontextmanager
async def worker(engine_url, tmp_path, agents=None, reward="exact_answer", **options):
    config = make_config(**{"concurrency": 8, "reward": reward, **options})
    async with session_server(engine_url, CHECKPOINT, config, log=tmp_path / "sessions.log") as sessions:
        yield RunContext(
            config=config,
            sessions=sessions,
            agents=agents or load_agents(["single_turn", "tool_loop", "branching"], "v2"),
            reward=load_reward(reward) if reward else None,
            engine={},
            slots=asyncio.Semaphore(config.concurrency),
        )


async def shard(engine_url, tmp_path, given, **options):
    async with worker(engine_url, tmp_path, **options) as context:
        return await run_shard(given, context=context, stamp=STAMP)


def only(given, *agents):
    return [one for one in given if one.agent in agents]


@pytest.mark.parametrize(
    ("version", "agents"), [("v1", ["single_turn", "tool_loop"]), ("v2", ["single_turn", "tool_loop", "branching"])]
)
async def test_the_agents_give_finished_rows_and_branches_share_their_id(engine, tmp_path, version, agents):
    given = only(inputs(5, n_samples=2), *agents)
    result = await shard(engine.url, tmp_path, given, session_version=version, agents=load_agents(agents, version))
    rows = table_to_samples(result.samples)
    by_index = {one.index: [row for row in rows if row.index == one.index] for one in given}
    assert all(by_index.values())
    assert {} == result.counts["failures"]
    for one in given:
        siblings = by_index[one.index]
        assert {one.index if len(siblings) > 1 else None} == {row.rollout_id for row in siblings}
        assert [(k, len(siblings)) for k in range(len(siblings))] == [(row.sibling, row.siblings) for row in siblings]
        assert 1 == len({row.reward for row in siblings}) and siblings[0].reward in (0.0, 1.0)
    several = {one.agent for one in given if len(by_index[one.index]) == 2}
    assert ({"branching"} if version == "v2" else set()) == several
    trained = sum(int(row.loss_mask_R.sum()) for row in rows)
    assert 0 < trained <= result.counts["tokens_sampled"]


async def test_greedy_rollouts_answer_through_the_tools_on_both_versions(engine, tmp_path):
    given = [one for one in only(inputs(24), "tool_loop") if one.metadata["kind"] in TOOL_KINDS]
    assert len(given) >= 8
    rewards = {}
    for version in ("v1", "v2"):
        agents = load_agents(["tool_loop"], version)
        options = {"temperature": 0.0, "session_version": version, "agents": agents}
        result = await shard(engine.url, tmp_path, given, **options)
        rewards[version] = result.samples["reward"].to_pylist()
        assert max(result.samples["turns"].to_pylist()) >= 2
        calls = [json.loads(text)["tool_calls"] for text in result.samples["metadata"].to_pylist()]
        assert sum(calls) >= len(given)
    assert rewards["v1"] == rewards["v2"]
    assert sum(rewards["v1"]) >= 0.9 * len(given)


@pytest.mark.full
async def test_the_same_seed_gives_the_same_rows_at_any_concurrency(engine, tmp_path):
    given = inputs(4, n_samples=2)
    alone = await shard(engine.url, tmp_path, given, concurrency=1, seed=5)
    wide = await shard(engine.url, tmp_path, given, concurrency=16, seed=5)
    other = await shard(engine.url, tmp_path, given, concurrency=16, seed=6)
    assert [] == same_rows(alone.samples, wide.samples)
    assert [] != same_rows(alone.samples, other.samples)


def agent(name, after=1, then=None):
    async def run(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
        client = openai_client(base_url, api_key)
        for _ in range(after):
            reply = await client.chat.completions.create(model="m", messages=prompt, extra_body=request_kwargs)
            prompt += [reply.choices[0].message.model_dump(exclude_unset=True), {"role": "user", "content": "More."}]
        if isinstance(then, Exception):
            raise then
        if then == "hang":
            await asyncio.sleep(600)

    return Agent(name=name, run=run)


MISBEHAVING = [
    agent("fine"),
    agent("raises_at_once", 0, ValueError("boom")),
    agent("raises_after_turns", 2, ValueError("boom")),
    agent("gives_up", 1, TimeoutError("own")),
    agent("hangs", 1, "hang"),
    agent("silent", 0),
    agent("talks_on", 9),
]


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_every_failure_is_a_typed_row_and_the_others_are_untouched(engine, tmp_path, version):
    messages = [{"role": "user", "content": "What is 4 + 3?"}]
    given = [
        RolloutInput(index=k, group_index=k, messages=messages, label="7", agent=one.name)
        for k, one in enumerate(MISBEHAVING)
    ]
    result = await shard(
        engine.url,
        tmp_path,
        given,
        agents={one.name: one for one in MISBEHAVING},
        session_version=version,
        max_turns=3,
        temperature=0.0,
        rollout_timeout_s=4.0,
    )
    rows = {row.agent: row for row in table_to_samples(result.samples)}
    failures = {name: row.failure and (row.failure.type, row.turns) for name, row in rows.items()}
    assert {
        "fine": None,
        "raises_at_once": ("agent_error", 0),
        "raises_after_turns": ("agent_error", 2),
        "gives_up": ("agent_timeout", 1),
        "hangs": ("deadline", 1),
        "silent": ("no_turns", 0),
        "talks_on": ("max_turns", 3),
    } == failures
    assert {name: name == "fine" for name in failures} == {name: row.reward is not None for name, row in rows.items()}


async def test_a_dead_engine_is_an_engine_error_after_its_attempts(tmp_path):
    child = await start_embedded(None, log=tmp_path / "engine.log")
    given = only(inputs(1), "single_turn")
    async with worker(child.url, tmp_path) as context:
        child.stop()
        result = await run_shard(given, context=context, stamp=STAMP)
    (row,) = table_to_samples(result.samples)
    assert ("engine_error", 1, None) == (row.failure.type, row.attempt, row.reward)


async def test_a_sessions_key_opens_no_other_session_and_no_drivers_route(engine, tmp_path):
    async with worker(engine.url, tmp_path) as context:
        mine, other = [await context.sessions.open({"version": "v2"}) for _ in range(2)]
        client = openai_client(other.base_url, mine.session_key)
        with pytest.raises(Exception, match=r"40[13]"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        assert 0 == len((await context.sessions.tape(other.session_id)).exchanges)
        for session in (mine, other):
            await context.sessions.delete(session.session_id)
