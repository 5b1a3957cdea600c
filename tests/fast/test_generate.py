"""One input to its rows against a fake session server that injects faults: every way to fail is a typed row."""

import asyncio
import time

import pytest
from faulty_sessions import FaultySessions, serving

from rollout.agents.contract import Agent
from rollout.agents.openai_client import close_connections, openai_client
from rollout.config import make_config
from rollout.engine.outages import Outages
from rollout.generate import RunContext, generate, session_seed
from rollout.outcome import RolloutInput
from rollout.rewards import Reward, load_reward
from rollout.sample import Status
from rollout.session.client import SessionClient


def asking(turns, then=None, catch=False):
    """An agent that makes `turns` requests and then returns `then`, or raises it."""

    async def run(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
        client = openai_client(base_url, api_key)
        for _ in range(turns):
            try:
                await client.chat.completions.create(model="m", messages=prompt, extra_body=request_kwargs)
            except Exception:
                if not catch:
                    raise
        if isinstance(then, Exception):
            raise then
        return then

    return run


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr("rollout.generate.BACKOFF_S", 0.01)


async def play(fake, run, *, reward=None, metadata=None, outages=None, **options):
    config = make_config(**{"rollout_timeout_s": 5.0, "agent": "test", **options})
    messages = [{"role": "user", "content": "q"}]
    given = RolloutInput(index=3, group_index=1, messages=messages, label="4", agent="test", metadata=metadata or {})
    async with serving(fake), SessionClient(fake.url) as sessions:
        context = RunContext(
            config=config,
            sessions=sessions,
            agents={"test": Agent(name="test", run=run)},
            reward=reward,
            engine={},
            slots=asyncio.Semaphore(1),
            outages=outages or Outages(notice_s=0.0),
        )
        try:
            result = await generate(given, context)
        finally:
            await close_connections()
    assert all(session.deleted for session in fake.sessions)
    for row in result.samples:
        row.validate()
    return result


def failure(result):
    """The one failure of all rows of a result."""
    (found,) = {(row.failure.type, row.failure.message) for row in result.samples}
    assert {(None, True)} == {(row.reward, row.remove_sample) for row in result.samples}
    return found


async def test_an_undisturbed_rollout_is_one_finished_row():
    result = await play(FaultySessions(), asking(2), reward=load_reward("exact_answer"))
    (row,) = result.samples
    assert (3, 1, None, 0, 1, 1.0, None, "4", "test") == (
        *(row.index, row.group_index, row.rollout_id, row.sibling, row.siblings),
        *(row.reward, row.failure, row.label, row.agent),
    )
    assert (2, 4, 0.5, 2) == (result.turns, result.sampled_tokens, result.engine_seconds, len(result.tape.exchanges))


async def test_several_leaves_share_the_inputs_index_and_one_score():
    calls = []
    reward = Reward(name="r", score=lambda rollout: calls.append(len(rollout.samples)) or 0.5)
    result = await play(FaultySessions(leaves=3), asking(1), reward=reward)
    assert [(3, 0.5, k, 3) for k in range(3)] == [
        (row.rollout_id, row.reward, row.sibling, row.siblings) for row in result.samples
    ]
    assert [3] == calls


async def test_c12_the_session_is_opened_with_the_batchs_settings():
    fake = FaultySessions()
    await play(fake, asking(1), seed=7, temperature=0.5, max_seq_len=99, session_version="v1", control_text="plain")
    assert {
        "version": "v1",
        "matcher": "loose_tool_call",
        "picker": "drop_retries",
        "finisher": "train_once",
        "sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_new_tokens": 128},
        "seed": session_seed(7, 3, 0),
        "max_seq_len": 99,
        "max_turns": 16,
        "control_text": "plain",
        "lora": None,
        "routed_experts": False,
    } == fake.sessions[0].settings


async def test_a_rows_own_sampling_is_pinned_and_told_to_the_agent():
    fake, told = FaultySessions(), []

    async def agent(base_url, prompt, request_kwargs, metadata, **kwargs):
        told.append(request_kwargs)
        return await asking(1)(base_url, prompt, request_kwargs, metadata, **kwargs)

    own = {"sampling": {"temperature": 0.25, "max_new_tokens": 9}}
    await play(fake, agent, metadata=own, top_p=0.5, sampling_bounds="temperature=0:1,max_new_tokens=1:9")
    assert {"temperature": 0.25, "top_p": 0.5, "top_k": -1, "max_new_tokens": 9} == fake.sessions[0].settings[
        "sampling"
    ]
    assert (0.25, 9, 0.5) == (told[0]["temperature"], told[0]["max_tokens"], told[0]["top_p"])


def test_the_seed_of_a_session_is_frozen_and_distinct():
    """A resumed batch repeats its seeds for ever, so this value never changes."""
    assert "eae166ad04cd63fbb72b309b8f21f068" == session_seed(7, 3, 1)
    seeds = {session_seed(*numbers) for numbers in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**53 - 1, 0, 0)]}
    assert 5 == len(seeds)


async def test_an_engine_fault_gets_another_attempt_with_another_session_and_seed():
    fake = FaultySessions(script=lambda session, request: 502 if (session, request) == (0, 1) else None)
    result = await play(fake, asking(2))
    (row,) = result.samples
    assert (1, None, Status.COMPLETED, 2) == (row.attempt, row.failure, row.status, row.turns)
    assert [session_seed(0, 3, 0), session_seed(0, 3, 1)] == [session.settings["seed"] for session in fake.sessions]


async def test_an_engine_that_never_answers_is_a_typed_failure_never_a_zero():
    """G16: the engine answers 500 to every request of one rollout."""
    fake = FaultySessions(script=lambda session, request: "engine_500")
    result = await play(fake, asking(1), reward=load_reward("exact_answer"), max_attempts=3)
    kind, message = failure(result)
    assert ("engine_error", 3, Status.FAILED, 2) == (
        kind,
        len(fake.sessions),
        result.samples[0].status,
        result.outcome.attempt,
    )
    assert message.startswith("1 turns answered engine_500; InternalServerError: ")


async def test_an_agent_that_swallows_the_engines_fault_and_has_no_turn_is_an_engine_error_too():
    fake = FaultySessions(script=lambda session, request: 503)
    assert ("engine_error", "2 turns answered 503; the agent returned without a turn") == failure(
        await play(fake, asking(2, catch=True), max_attempts=1)
    )


async def test_an_agent_that_rides_out_a_fault_has_no_failure():
    fake = FaultySessions(script=lambda session, request: 502 if request == 0 else None)
    (row,) = (await play(fake, asking(3, catch=True))).samples
    assert (None, 2, 1) == (row.failure, row.turns, len(fake.sessions))


@pytest.mark.parametrize(
    ("agent", "options", "kind", "turns"),
    [
        (asking(0, ValueError("boom")), {}, "agent_error", 0),
        (asking(3, ValueError("boom")), {}, "agent_error", 3),
        (asking(2, TimeoutError("own")), {}, "agent_timeout", 2),
        (asking(2, {"x": float("nan")}), {}, "agent_error", 2),
        (asking(0), {}, "no_turns", 0),
        (lambda *a, **k: time.sleep(0.6), {"rollout_timeout_s": 0.2}, "deadline", 0),
    ],
)
async def test_c12_an_agents_own_failure_is_not_repeated_and_keeps_its_good_turns(agent, options, kind, turns):
    fake = FaultySessions()
    result = await play(fake, agent, reward=load_reward("exact_answer"), **options)
    assert (kind, turns, 1) == (failure(result)[0], result.turns, len(fake.sessions))
    assert (Status.COMPLETED if turns else Status.FAILED) == result.samples[0].status


@pytest.mark.parametrize(
    ("agent", "kind", "attempts"),
    [
        (asking(2, ValueError("boom")), "agent_error", 3),
        (asking(1, TimeoutError("own")), "agent_timeout", 3),
        (asking(0), "no_turns", 1),
        (asking(9), "max_turns", 1),
        (lambda *a, **k: time.sleep(0.6), "deadline", 1),
    ],
)
async def test_an_agents_own_failure_is_repeated_where_the_batch_says_so(agent, kind, attempts):
    fake = FaultySessions(script=lambda session, request: 429 if request == 3 else None)
    limit = 0.2 if kind == "deadline" else 5.0
    result = await play(fake, agent, retry_agent_errors=True, max_attempts=3, rollout_timeout_s=limit)
    assert (kind, attempts) == (failure(result)[0], len(fake.sessions))
    assert [session_seed(0, 3, k) for k in range(attempts)] == [one.settings["seed"] for one in fake.sessions]
    assert {attempts - 1} == {row.attempt for row in result.samples}


@pytest.mark.parametrize(("status", "kind"), [(429, "max_turns"), (500, "session_error"), (400, "agent_error")])
async def test_the_sessions_record_says_whose_fault_a_refused_turn_was(status, kind):
    fake = FaultySessions(script=lambda session, request: status if request == 2 else None)
    result = await play(fake, asking(5))
    assert (kind, 2, 1) == (failure(result)[0], result.turns, len(fake.sessions))


async def test_an_engine_that_refuses_a_request_is_no_outage_and_the_request_is_not_repeated():
    fake = FaultySessions(script=lambda session, request: "engine_400" if request == 1 else None)
    begun = time.monotonic()
    result = await play(fake, asking(5), outages=Outages(notice_s=60.0))
    kind, message = failure(result)
    assert ("agent_error", True, 1, 1) == (kind, "fault engine_400" in message, result.turns, len(fake.sessions))
    assert time.monotonic() - begun < 30


async def test_an_engine_that_is_busy_gets_another_attempt():
    fake = FaultySessions(script=lambda session, request: "engine_429" if session == 0 else None)
    result = await play(fake, asking(1))
    assert (None, 1) == (result.outcome.failure, result.outcome.attempt)


async def test_a_turn_that_hangs_ends_at_the_rollouts_deadline_and_frees_the_session():
    fake = FaultySessions(script=lambda session, request: 30.0 if request == 1 else None)
    begun = time.monotonic()
    result = await play(fake, asking(2), rollout_timeout_s=0.3)
    assert ("deadline", 1) == (failure(result)[0], result.turns)
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize(
    ("faults", "kind", "attempts"),
    [
        ({"open": [0]}, None, 1),
        ({"open": [0, 0]}, "session_error", 1),
        ({"open": [500]}, "session_error", 0),
        ({"open": [429]}, "session_error", 0),
        ({"samples": [422]}, "session_error", 0),
        ({"samples": [0]}, None, 1),
        ({"tape": [500]}, "session_error", 0),
        ({"delete": [500]}, None, 0),
    ],
)
async def test_a_session_server_without_an_answer_gets_another_attempt_and_a_refusal_does_not(faults, kind, attempts):
    result = await play(FaultySessions(faults=faults), asking(1))
    (row,) = result.samples
    assert (kind, attempts) == (row.failure and row.failure.type, result.outcome.attempt)
    if kind:
        failure(result)


async def test_no_attempt_begins_after_the_deadline(monkeypatch):
    monkeypatch.setattr("rollout.generate.BACKOFF_S", 5.0)
    fake = FaultySessions(script=lambda session, request: 502)
    result = await play(fake, asking(1), rollout_timeout_s=0.5, max_attempts=5)
    assert ("engine_error", 1) == (failure(result)[0], len(fake.sessions))


async def test_a_turn_that_arrives_late_is_in_both_the_samples_and_the_tape():
    result = await play(FaultySessions(late=2), asking(1))
    assert [3] == [row.turns for row in result.samples] and 3 == len(result.tape.exchanges)


async def test_a_bad_reward_fails_the_rollout_and_keeps_its_samples():
    result = await play(
        FaultySessions(leaves=2), asking(1), reward=Reward(name="r", score=lambda rollout: float("nan"))
    )
    assert ("reward_error", "r gave nan, not a finite number") == failure(result)
    assert [Status.COMPLETED] * 2 == [row.status for row in result.samples]


async def test_a_failed_rollout_is_not_scored():
    calls = []
    reward = Reward(name="r", score=lambda rollout: calls.append(1) or 1.0)
    failure(await play(FaultySessions(), asking(1, ValueError("boom")), reward=reward))
    assert [] == calls


async def test_the_agents_own_reward_stays_in_the_metadata_when_another_wins():
    agent = asking(1, {"reward": 0.25, "metadata": {"note": "x"}, "extra": 1})
    (row,) = (await play(FaultySessions(), agent, reward=load_reward("exact_answer"))).samples
    assert (1.0, 0.25, "x") == (row.reward, row.metadata["reward"], row.metadata["note"])
    (row,) = (await play(FaultySessions(), agent)).samples
    assert 0.25 == row.reward


async def test_cancelling_a_rollout_deletes_its_session():
    fake = FaultySessions(script=lambda session, request: 30.0)
    task = asyncio.create_task(play(fake, asking(1)))
    while not fake.sessions or not fake.sessions[0].asked:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.sessions[0].deleted


async def test_an_engine_that_its_supervisor_lost_costs_no_attempt():
    outages = Outages(notice_s=0.5)

    def lost(session, request):
        if session == 3:
            return None
        outages.lost()
        asyncio.get_running_loop().call_later(0.05, setattr, outages, "up", True)
        return 502

    fake = FaultySessions(script=lost)
    (row,) = (await play(fake, asking(1), outages=outages, max_attempts=1)).samples
    assert (3, None, Status.COMPLETED) == (row.attempt, row.failure, row.status)
    assert 4 == len({session.settings["seed"] for session in fake.sessions})


async def test_an_engine_that_is_well_again_costs_one_attempt_as_ever():
    outages = Outages(notice_s=0.01)
    outages.lost()
    outages.up = True
    fake = FaultySessions(script=lambda session, request: 502)
    (row,) = (await play(fake, asking(1), outages=outages, max_attempts=2)).samples
    assert ("engine_error", 1, 2) == (row.failure.type, row.attempt, len(fake.sessions))
