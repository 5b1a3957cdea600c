"""Failures that other people met with their agents and rewards, by their ids: with the real command or sessions."""

import asyncio
import json
import math

import pytest
from aiohttp import web
from command import Rollout
from faulty_proxy import FaultyProxy
from installing import install

from rollout.agents.contract import Agent
from rollout.agents.openai_client import openai_client
from rollout.batch.sessions import session_server
from rollout.config import make_config
from rollout.engine.tiny import CHECKPOINT
from rollout.generate import RunContext, generate
from rollout.lake import scan_samples
from rollout.lake.reading import scan_batches
from rollout.outcome import RolloutInput

CODE = """
import itertools

from rollout.agents.single_turn import run as ask

agents, judges = itertools.count(), itertools.count()


async def second_times_out(*args, **kwargs):
    await ask(*args, **kwargs)
    if next(agents) == 1:
        raise TimeoutError("no answer from a tool")


async def makes_no_call(*args, **kwargs):
    return {"reward": 1.0, "metadata": {"answer": "7"}}


def judge(rollout):
    if rollout.row.metadata["judge"] == "nan":
        return float("nan")
    number = next(judges)
    if number == 0:
        raise KeyError("the judge's server")
    return number - 1
"""
AGENTS = {"second_times_out": "second_times_out", "makes_no_call": "makes_no_call"}
QUESTION = [{"role": "user", "content": "What is 4 + 3?"}]
ROWS = [
    {"messages": QUESTION, "agent": "second_times_out", "metadata": {"judge": "counts"}},
    {"messages": QUESTION, "agent": "single_turn", "metadata": {"judge": "nan"}},
    {"messages": QUESTION, "agent": "makes_no_call", "metadata": {"judge": "nan"}},
]


@pytest.fixture(scope="module")
def batch(rollout_home, tmp_path_factory):
    """One batch of three groups of four: its answer as the command printed it, its lake, and its rows by group."""
    folder = tmp_path_factory.mktemp("cases")
    entries = {"rollout.agents": AGENTS, "rollout.rewards": {"judge": "judge"}}
    site = install(folder / "site", "case-agents", CODE, entries)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    command = Rollout(home=rollout_home, cwd=folder, environment={"PYTHONPATH": str(site)})
    printed = command.succeeds(
        *("run", "--prompts", "prompts.jsonl", "--batch-id", "cases", "--reward", "judge", "--concurrency", 1),
        *("--max-failed-in-a-row", "none", "--json"),
    )
    rows = scan_samples(str(folder / "lake"), batch="cases").sort("index").collect().to_dicts()
    return printed, str(folder / "lake"), [rows[:4], rows[4:8], rows[8:]]


def no_nan(text):
    """The parsed JSON; NaN and infinities, which are none, are an error."""

    def refuse(constant):
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def test_g48_two_failures_stay_outside_their_groups_statistics(batch):
    printed, _, (rows, _, _) = batch
    outcomes = sorted((row["failure"]["type"] if row["failure"] else "", row["reward"]) for row in rows)
    assert [("", 0.0), ("", 1.0), ("agent_timeout", None), ("reward_error", None)] == outcomes
    assert [row["failure"] is not None for row in rows] == [row["remove_sample"] for row in rows]
    assert 0.5 == no_nan(printed)["summary"]["group_rewards"][0], "the mean of 0 and 1, not of four"


def test_g56_an_agent_that_answers_without_a_model_call_has_a_row(batch):
    _, _, (_, _, rows) = batch
    assert 4 == len(rows)
    for row in rows:
        assert ("no_turns", "failed", True, None) == (
            *(row["failure"]["type"], row["status"], row["remove_sample"], row["reward"]),
        )
        assert [] == row["tokens"] and "7" == json.loads(row["metadata"])["answer"]


def test_g61_a_reward_that_is_no_number_reaches_neither_column_nor_statistics(batch):
    printed, lake, (counted, rows, silent) = batch
    assert {("reward_error", None, None)} == {
        (row["failure"]["type"], row["reward"], row["reward_json"]) for row in rows
    }
    assert all("nan, not a finite number" in row["failure"]["message"] for row in rows)
    summary = no_nan(printed)["summary"]
    assert [0.5, None, None] == summary["group_rewards"], "a group without rewards has no mean"
    (stored,) = scan_batches(lake).collect().to_dicts()
    numbers = [value for value in stored.values() if isinstance(value, float)]
    assert numbers and all(math.isfinite(number) for number in numbers)
    for row in (*counted, *rows, *silent):
        no_nan(row["metadata"])


async def talk(proxy, tmp_path, turns, **options):
    """One rollout of `turns` turns, each of which asks for 12 tokens."""

    async def run(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
        client = openai_client(base_url, api_key)
        for _ in range(turns):
            body = {**request_kwargs, "max_tokens": 12}
            reply = await client.chat.completions.create(model="m", messages=prompt, extra_body=body)
            prompt += [reply.choices[0].message.model_dump(exclude_unset=True), {"role": "user", "content": "Go on."}]

    config = make_config(max_new_tokens=12, session_version="v1", reward=None, temperature=0.0, **options)
    async with session_server(proxy.url, CHECKPOINT, config, log=tmp_path / "sessions.log") as sessions:
        given = RolloutInput(index=0, group_index=0, messages=QUESTION, agent="asks")
        context = RunContext(
            config=config,
            sessions=sessions,
            agents={"asks": Agent(name="asks", run=run)},
            reward=None,
            engine={},
            slots=asyncio.Semaphore(1),
        )
        return await generate(given, context)


async def test_g46_the_engine_gets_what_fits_and_a_4xx_is_not_repeated(engine, tmp_path):
    async with FaultyProxy(engine.url).serving() as proxy:
        await talk(proxy, tmp_path, 2)
        first, second = proxy.seen
        limit = len(second["input_ids"]) + 7
        assert 12 == second["sampling_params"]["max_new_tokens"]
        proxy.seen.clear()
        result = await talk(proxy, tmp_path, 3, max_seq_len=limit)
        assert [12, 7] == [request["sampling_params"]["max_new_tokens"] for request in proxy.seen]
        assert first["input_ids"] == proxy.seen[0]["input_ids"]
        (row,) = result.samples
        assert ("agent_error", 0, 2) == (row.failure.type, row.attempt, result.turns)
        assert f"{limit} is the limit" in row.failure.message

        async def refuses(request):
            return web.json_response({"error": {"message": "too long"}}, status=400)

        proxy.seen.clear()
        proxy.fault = refuses
        result = await talk(proxy, tmp_path, 1)
        assert (1, 0) == (len(proxy.seen), result.samples[0].attempt)
        assert "agent_error" == result.samples[0].failure.type
