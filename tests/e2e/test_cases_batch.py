"""Failures that other people met in batches, by their ids: each with the real sessions, engine and command."""

import asyncio
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
import pytest
from command import Rollout
from faulty_proxy import FaultyProxy, failing

from rollout.agents.contract import Agent, load_agents
from rollout.agents.openai_client import openai_client
from rollout.batch.sessions import session_server
from rollout.batch.shard import run_shard
from rollout.batch.spool import open_spool
from rollout.columns import BatchStamp, table_to_samples
from rollout.config import make_config
from rollout.engine.tiny import CHECKPOINT
from rollout.errors import SessionRefused
from rollout.generate import RunContext
from rollout.lake import LakePaths, scan_samples
from rollout.lake.publishing import batch_status
from rollout.lake.staging import read_plan, read_staged, staged_shards
from rollout.outcome import RolloutInput
from rollout.rewards import load_reward
from rollout.session.tape import table_to_tape
from rollout.tape_columns import TAPE_SCHEMA
from rollout.tito.tokenizer import load_tokenizer

STAMP = BatchStamp(
    batch_id="b",
    run_date=date(2026, 1, 1),
    shard=0,
    engine={"name": "embedded"},
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)


@asynccontextmanager
async def worker(engine_url, tmp_path, agents, **options):
    """What a shard's rollouts need, with a session server of its own."""
    config = make_config(**{"concurrency": 4, **options})
    async with session_server(engine_url, CHECKPOINT, config, log=tmp_path / "sessions.log") as sessions:
        yield RunContext(
            config=config,
            sessions=sessions,
            agents=agents,
            reward=load_reward("exact_answer"),
            engine={},
            slots=asyncio.Semaphore(config.concurrency),
        )


def asked(*texts, agent):
    return [
        RolloutInput(index=k, group_index=k, messages=[{"role": "user", "content": text}], label="4", agent=agent)
        for k, text in enumerate(texts)
    ]


def tape_of(result, index):
    rows = [k for k, found in enumerate(result.trajectories["index"].to_pylist()) if found == index]
    return table_to_tape(result.trajectories.take(rows).select(TAPE_SCHEMA.names))


async def test_g16_an_engine_that_answers_500_to_one_rollout_gives_a_typed_row_and_no_reward(engine, tmp_path):
    decode = load_tokenizer(str(CHECKPOINT)).decode

    async def fault(request):
        return failing() if "7 + 9" in decode(request["input_ids"]) else None

    async with FaultyProxy(engine.url).serving() as proxy:
        proxy.fault = fault
        given = asked("What is 1 + 3?", "What is 7 + 9?", "What is 2 + 2?", agent="single_turn")
        async with worker(proxy.url, tmp_path, load_agents(["single_turn"], "v2")) as context:
            result = await run_shard(given, context=context, stamp=STAMP)
    first, broken, last = table_to_samples(result.samples)
    assert ("engine_error", "failed", True, None, None, 1) == (
        *(broken.failure.type, broken.status, broken.remove_sample, broken.reward, broken.reward_json),
        broken.attempt,
    )
    assert "1 turns answered engine_500" in broken.failure.message and 0 == len(broken.tokens_T)
    assert 4 == len(proxy.seen), "two attempts at the broken one, one at each of the others"
    for row in (first, last):
        assert (None, False, 0) == (row.failure, row.remove_sample, row.attempt) and row.reward is not None


def status_of(base_url, api_key, body):
    """The status that a chat request is answered with."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = Request(f"{base_url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=60) as reply:
            return reply.status
    except HTTPError as error:
        with error:
            return error.code


class DiesWithATurnInFlight:
    """Makes two turns; on its first attempt it leaves a third in flight and dies of the engine's fault at a fourth."""

    def __init__(self):
        self.sessions = []
        self.pool = ThreadPoolExecutor(1)
        self.late = None

    async def __call__(self, base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
        client = openai_client(base_url, api_key)
        self.sessions.append((base_url, api_key))

        async def turn(messages):
            reply = await client.chat.completions.create(model="m", messages=messages, extra_body=request_kwargs)
            return [*messages, reply.choices[0].message.model_dump(exclude_unset=True)]

        history = await turn(prompt)
        history = await turn([*history, {"role": "user", "content": "And now?"}])
        if len(self.sessions) == 1:
            body = {"model": "m", "messages": [*history, {"role": "user", "content": "late"}], **request_kwargs}
            # No task of the agent's loop: that ends with the attempt, and all that runs on it.
            self.late = self.pool.submit(status_of, base_url, api_key, body)
            await asyncio.sleep(0.2)
            await turn([*history, {"role": "user", "content": "broken"}])


async def test_g36_what_a_dead_attempt_still_gets_changes_nothing(engine, tmp_path):
    decode, released, agent = load_tokenizer(str(CHECKPOINT)).decode, asyncio.Event(), DiesWithATurnInFlight()

    async def fault(request):
        text = decode(request["input_ids"])
        if "late" in text:
            await released.wait()
        if len(agent.sessions) == 2:
            released.set()  # the first attempt's answer comes while the second attempt runs
        return failing() if "broken" in text else None

    async with FaultyProxy(engine.url).serving() as proxy:
        proxy.fault = fault
        agents = {"dies": Agent(name="dies", run=agent)}
        async with worker(proxy.url, tmp_path, agents, temperature=0.0) as context:
            result = await run_shard(asked("What is 2 + 2?", agent="dies"), context=context, stamp=STAMP)
            (first_url, first_key), (second_url, _) = agent.sessions
            assert 404 == await asyncio.wrap_future(agent.late)
            agent.pool.shutdown()
            with pytest.raises(SessionRefused) as gone:
                await context.sessions.tape(first_url.rpartition("/")[2])
            assert 404 == gone.value.status
            with pytest.raises(Exception, match="404"):
                client = openai_client(first_url, first_key)
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
    (row,) = table_to_samples(result.samples)
    tape, outcome = tape_of(result, 0)
    assert (1, 2, None) == (row.attempt, row.turns, row.failure)
    assert (second_url.rpartition("/")[2], 2, 1) == (tape.session_id, len(tape.exchanges), outcome["attempt"])
    assert "late" not in row.response and 1 == result.counts["repeated"]


async def sdk(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    """The SDK with its own two retries, which the engine's own 500 leaves to it."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=2) as client:
        await client.chat.completions.create(model="m", messages=prompt, extra_body=request_kwargs)


async def stubborn(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    """A client that repeats whatever the server says."""
    body = {"model": "m", "messages": prompt, **request_kwargs}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(3):
            async with http.post(f"{base_url}/v1/chat/completions", json=body) as reply:
                if reply.status == 200:
                    return


@pytest.mark.parametrize("agent", [sdk, stubborn])
async def test_g59_a_repeat_behind_the_agents_back_is_a_call_of_the_engine_and_no_turn(engine, tmp_path, agent):
    async with FaultyProxy(engine.url).serving() as proxy:

        async def fault(request):
            return failing() if len(proxy.seen) == 1 else None

        proxy.fault = fault
        async with worker(proxy.url, tmp_path, {"asks": Agent(name="asks", run=agent)}) as context:
            result = await run_shard(asked("What is 2 + 2?", agent="asks"), context=context, stamp=STAMP)
    (row,) = table_to_samples(result.samples)
    tape, _ = tape_of(result, 0)
    assert (None, 0, 1) == (row.failure, row.attempt, row.turns)
    assert (2, 1, {"engine_500": 1}, 1) == (
        *(len(proxy.seen), len(tape.exchanges), tape.refused),
        result.counts["turns"],
    )
    first, second = (request["sampling_params"]["sampling_seed"] for request in proxy.seen)
    assert first == second == tape.exchanges[0].sampling_seed


def prompts(folder: Path, *texts: str) -> Path:
    path = folder / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}], "label": "4"} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_g18_a_prompt_three_times_in_the_file_killed_after_one_makes_exactly_the_missing_two(
    quick_rollout: Rollout, engine, tmp_path: Path
):
    never = asyncio.Event()
    proxy = FaultyProxy(engine.url)

    async def fault(request):
        if len(proxy.seen) == 2:
            await never.wait()

    proxy.fault = fault
    command = ["run", "--prompts", prompts(tmp_path, *["What is 2 + 2?"] * 3), "--lake", tmp_path / "lake"]
    command += ["--batch-id", "thrice", "--agent", "single_turn", "--n-samples-per-prompt", 1, "--concurrency", 1]
    with proxy.in_thread():
        command += ["--engine", "external", "--engine-url", proxy.url]
        run = quick_rollout.start(*command)
        end = time.monotonic() + 120
        while len(proxy.seen) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        run.end(signal.SIGKILL)
        assert [] == run.left_over()
        quick_rollout.succeeds(*command)
    seeds = [request["sampling_params"]["sampling_seed"] for request in proxy.seen]
    assert 4 == len(seeds), "the first, the one in flight at the kill, and the two that were missing"
    assert 3 == len(set(seeds)) and seeds[0] not in seeds[1:] and seeds[1] == seeds[2]
    rows = scan_samples(tmp_path / "lake", batch="thrice").collect()
    assert [0, 1, 2] == sorted(rows["index"]) and 1 == rows["prompt"].n_unique()


RAISES = """
import os
import signal

from rollout.agents.single_turn import run as mended


async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
    if not os.path.exists(os.environ["MENDED"]):
        raise ValueError("boom")
    return await mended(base_url, prompt, request_kwargs, metadata, **kwargs)
"""


def install(folder: Path, name: str, code: str) -> None:
    """An agent in a package of its own, as pip would leave it in `folder`."""
    (folder / f"{name}.py").write_text(code)
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[rollout.agents]\n{name} = {name}:run\n")


def test_g17_an_agent_that_raises_on_every_input_ends_the_batch_early_and_its_rows_are_kept(
    quick_rollout: Rollout, tmp_path: Path
):
    packages, mended, lake = tmp_path / "packages", tmp_path / "mended", tmp_path / "lake"
    packages.mkdir()
    install(packages, "raises", RAISES)
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    quick_rollout.environment = {**quick_rollout.environment, "PYTHONPATH": path, "MENDED": str(mended)}
    texts = [f"What is {k} + 2?" for k in range(24)]
    command = ["run", "--prompts", prompts(tmp_path, *texts), "--lake", lake, "--batch-id", "raises"]
    command += ["--agent", "raises", "--n-samples-per-prompt", 1, "--shard-size", 4, "--concurrency", 2]
    command += ["--max-failed-in-a-row", 6]
    run = quick_rollout.start(*command)
    done = run.wait()
    assert (1, []) == (done.returncode, run.left_over())
    # Two at a time: the other one may have ended before the batch does, and is counted then.
    said = re.findall(r"([67]) rollouts failed in a row, all with agent_error: ValueError: boom", done.stderr)
    assert 1 == len(said) == done.stderr.count("boom"), done.stderr
    assert "`rollout run --batch-id raises` goes on" in done.stderr and "Traceback" not in done.stderr

    assert "FAILED" == last_flow_run(quick_rollout.environment["PREFECT_API_URL"])["state_type"]

    failed = kept_rows(lake, quick_rollout.home)
    assert 6 <= len(failed) < 24 and {"agent_error"} == set(failed.values())
    assert batch_status(LakePaths(lake), "raises") is None

    mended.touch()
    quick_rollout.succeeds("run", "--lake", lake, "--batch-id", "raises")
    rows = scan_samples(lake, batch="raises").collect()
    assert 24 == rows.height
    assert failed == {row["index"]: row["failure"]["type"] for row in rows.to_dicts() if row["failure"]}


def last_flow_run(api: str) -> dict:
    body = json.dumps({"sort": "START_TIME_DESC", "limit": 1}).encode()
    request = Request(f"{api}/flow_runs/filter", data=body, headers={"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as reply:
        (run,) = json.load(reply)
    return run


def kept_rows(lake: Path, home: Path) -> dict[int, str]:
    """Failure types by index of what is staged and of what the spools have."""
    paths = LakePaths(lake)
    plan, staged = read_plan(paths, "raises"), staged_shards(paths, "raises")
    tables = [read_staged(paths, manifest)[0] for manifest in staged.values()]
    for cut in plan.shards:
        if cut.shard not in staged:
            with open_spool(home / "spool", plan, cut.shard) as spool:
                tables += [rows.samples for rows in spool.rollouts]
    rows = [row for table in tables for row in table.select(["index", "failure"]).to_pylist()]
    return {row["index"]: row["failure"]["type"] for row in rows}
