"""One input to its samples: open a session, run the agent, collect, score, and never crash the batch.

What went wrong becomes the rows' typed `failure`:

deadline        the agent was still running when `rollout_timeout_s` was over
agent_timeout   the agent ended with a time-out of its own
agent_error     the agent raised, or returned what is not JSON; an engine that refused its request (4xx), too
agent_exit      the program of the agent `command` ended with an exit code other than 0
engine_error    the agent raised, ended so or made no turn, and the session's record has a failed engine call
max_turns       the agent raised or ended so, and the session's record has a turn refused for `max_turns`
session_error   the session server gave no answer, refused the driver, or failed inside (500)
reward_error    see rollout.rewards
no_turns, all_truncated   nothing went wrong, but there is no sample

An agent may wrap or swallow the HTTP errors that it gets, so its exception's class says little: the
session's own record of refused requests (Tape.refused, by HTTP status) decides whose fault it was.
A fault of the engine, or a session server without an answer, gets another attempt: a new session
with another seed. An agent's own exception does so only with `retry_agent_errors`, and no attempt begins
after the deadline. An engine that its supervisor had to start again is waited for, and what it took with
it is no statement about the rollout: that attempt counts neither towards `max_attempts`, nor does the
waiting towards the deadline. How often an engine is started again has a limit of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from dataclasses import dataclass, field
from typing import Any

from rollout.agents.contract import Agent, run_agent
from rollout.config import BatchConfig
from rollout.engine.outages import Outages
from rollout.errors import Failure, FailureType, RolloutFailure, RolloutLakeError, SessionUnreachable, describe
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.rewards import Reward, Rollout, score_rollout
from rollout.sample import Sample
from rollout.session.client import CollectedSamples, OpenedSession, SessionClient
from rollout.session.tape import ENGINE_PREFIX, Tape

log = logging.getLogger(__name__)

ENGINE_STATUSES = ("502", "503", "504")
"""HTTP statuses of a turn that mean: the engine failed or gave nonsense."""
BUSY_STATUSES = ("408", "429")
"""An engine's own statuses below 500 that say: not now. Its others refuse the request, whoever is asked."""
SESSION_STATUS = "500"
TURNS_STATUS = "429"
BACKOFF_S = 1.0
"""First wait before another attempt in seconds; doubled each time, times 0.5 to 1.5 by chance."""
BACKOFF_LIMIT_S = 8.0
ENGINE_PATIENCE_S = 1800.0
"""How long a rollout waits for an engine that is being started again, each time; longer than any start may take."""
AGENT_FAULTS = ("agent_error", "agent_timeout", "agent_exit")
"""Failures of the agent's own: other attempts only with `retry_agent_errors`."""
SETTLE_TRIES = 20
SETTLE_S = 0.05
"""How often, and how long apart in seconds, a session is read again while late turns still arrive."""


@dataclass(kw_only=True, slots=True)
class RunContext:
    """What all rollouts of a worker share.

    `agents` holds one for every name that an input carries (rollout.agents.contract.load_agents);
    `engine` describes the engine in the rows. `slots` limits the rollouts in flight at that engine:
    one object for all shards that use it. `outages`: what the engine's supervisor tells.
    """

    config: BatchConfig
    sessions: SessionClient
    agents: dict[str, Agent]
    reward: Reward | None
    engine: dict[str, Any]
    slots: asyncio.Semaphore
    outages: Outages = field(default_factory=lambda: Outages(notice_s=0.0))


@dataclass(kw_only=True, slots=True)
class RolloutResult:
    """A finished rollout: its rows, its tape (null if it could not be fetched) and what it cost."""

    samples: list[Sample]
    tape: Tape | None
    outcome: Outcome
    turns: int
    sampled_tokens: int
    engine_seconds: float


@dataclass(kw_only=True, slots=True)
class Attempted:
    """One attempt, before it is scored. `repeatable`: the fault was not the agent's."""

    outcome: Outcome
    collected: CollectedSamples = field(default_factory=lambda: CollectedSamples(samples=[]))
    tape: Tape | None = None
    repeatable: bool = False


async def generate(given: RolloutInput, run: RunContext) -> RolloutResult:
    """Run one input to its finished rows. Raises only on cancellation and on bugs of this package."""
    return await conclude(await attempt_rollout(given, run), run)


async def attempt_rollout(given: RolloutInput, run: RunContext) -> Attempted:
    """The attempts at one rollout up to the first that needs no other; the engine is free afterwards."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + run.config.rollout_timeout_s
    attempt = counted = 0
    while True:
        deadline += await run.outages.wait_up(ENGINE_PATIENCE_S)
        losses = run.outages.count
        last = await _attempt(given, run, attempt, deadline)
        if not _worth_another(last, run.config):
            break
        attempt += 1
        if last.repeatable and clock.time() < deadline and await run.outages.since(losses):
            log.warning("rollout %d: the engine was lost under it; another attempt when it is back", given.index)
            continue
        counted += 1
        pause_s = min(BACKOFF_LIMIT_S, BACKOFF_S * 2 ** (counted - 1)) * (0.5 + random.random())
        if counted == run.config.max_attempts or clock.time() + pause_s >= deadline:
            break
        failure = last.outcome.failure
        log.warning("rollout %d, attempt %d: %s; another attempt in %.1f s", given.index, attempt - 1, failure, pause_s)
        await asyncio.sleep(pause_s)
    return last


async def repeat_attempt(given: RolloutInput, run: RunContext, attempt: int) -> Attempted:
    """One attempt again, under the seed that it had; once more where engine or session server were at fault."""
    for _ in range(run.config.max_attempts):
        await run.outages.wait_up(ENGINE_PATIENCE_S)
        last = await _attempt(given, run, attempt, asyncio.get_running_loop().time() + run.config.rollout_timeout_s)
        if not last.repeatable:
            break
    return last


def _worth_another(last: Attempted, config: BatchConfig) -> bool:
    failure = last.outcome.failure
    return last.repeatable or (config.retry_agent_errors and failure is not None and failure.type in AGENT_FAULTS)


async def conclude(last: Attempted, run: RunContext) -> RolloutResult:
    """Score a rollout's last attempt, once, and make its rows."""
    outcome, samples = last.outcome, last.collected.samples
    if samples and outcome.failure is None:
        scored = Rollout(
            row=outcome.input,
            messages=last.collected.messages,
            samples=samples,
            agent_result=outcome.agent_result,
            session=last.collected.session_metadata,
        )
        try:
            score = await score_rollout(scored, run.reward, timeout_s=run.config.rollout_timeout_s)
            outcome.reward, outcome.reward_json = score.reward, score.json
        except RolloutFailure as error:
            outcome.failure = error.failure
    exchanges = last.tape.exchanges if last.tape else []
    return RolloutResult(
        samples=finish(samples, outcome),
        tape=last.tape,
        outcome=outcome,
        turns=len(exchanges),
        sampled_tokens=sum(len(exchange.output_ids_O) for exchange in exchanges),
        engine_seconds=sum(exchange.engine_seconds for exchange in exchanges),
    )


def session_seed(batch_seed: int, index: int, attempt: int) -> str:
    """The seed of one attempt's session in hex: blake2b over three little-endian 64-bit numbers.

    So an attempt repeats itself, another attempt and another member of the group do not.
    """
    numbers = b"".join(number.to_bytes(8, "little") for number in (batch_seed, index, attempt))
    return hashlib.blake2b(numbers, digest_size=16).hexdigest()


def session_settings(
    config: BatchConfig, index: int, attempt: int, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The body of POST /sessions for one attempt at the input with this index and metadata."""
    return {
        "version": config.session_version,
        "matcher": config.matcher,
        "picker": config.picker,
        "finisher": config.finisher,
        "sampling": config.sampling_of(metadata or {}),
        "seed": session_seed(config.seed, index, attempt),
        "max_seq_len": config.max_seq_len,
        "max_turns": config.max_turns,
        "control_text": config.control_text,
        "lora": config.lora,
        "routed_experts": config.routed_experts,
    }


async def _attempt(given: RolloutInput, run: RunContext, attempt: int, deadline: float) -> Attempted:
    outcome = Outcome(input=given, attempt=attempt, session_version=run.config.session_version)
    last = Attempted(outcome=outcome)
    try:
        session = await run.sessions.open(session_settings(run.config, given.index, attempt, given.metadata))
        try:
            await _play(given, run, session, last, deadline)
            last.collected, last.tape = await _collect(run, session.session_id)
        finally:
            await _delete(run, session.session_id)
    except RolloutLakeError as error:
        outcome.failure = Failure(type="session_error", message=describe(error))
        last.repeatable = isinstance(error, SessionUnreachable)
        return last
    outcome.empty_reason = last.collected.empty_reason
    _assign(last)
    return last


async def _play(given: RolloutInput, run: RunContext, session: OpenedSession, last: Attempted, deadline: float) -> None:
    """Run the agent; its failure, if any, is written down and never raised."""
    config, outcome = run.config, last.outcome
    try:
        result = await run_agent(
            run.agents[given.agent],
            given,
            session,
            sampling=config.sampling_of(given.metadata),
            max_seq_len=config.max_seq_len,
            timeout_s=deadline - asyncio.get_running_loop().time(),
        )
        outcome.agent_result = _keep_own_reward(result)
    except RolloutFailure as error:
        outcome.failure = error.failure


def _keep_own_reward(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """The agent's own reward stands in the rows' metadata too, whatever reward the batch configures."""
    if result is None or result.get("reward") is None:
        return result
    return {**result, "metadata": {"reward": result["reward"], **(result.get("metadata") or {})}}


async def _collect(run: RunContext, session_id: str) -> tuple[CollectedSamples, Tape]:
    """Samples and tape of one moment: both again while a turn that the agent left behind still arrives."""
    for _ in range(SETTLE_TRIES):
        collected = await run.sessions.samples(session_id, max_seq_len=run.config.max_seq_len)
        tape = await run.sessions.tape(session_id)
        if collected.exchanges in (None, len(tape.exchanges)):
            return collected, tape
        await asyncio.sleep(SETTLE_S)
    raise SessionUnreachable("turns kept arriving after the agent's end, so samples and tape never agreed")


async def _delete(run: RunContext, session_id: str) -> None:
    """Delete the session whatever happened; a server that is gone has none to delete."""
    try:
        await run.sessions.delete(session_id)
    except RolloutLakeError as error:
        log.warning("session %s was not deleted: %s", session_id, error)


def _assign(last: Attempted) -> None:
    """Say whose fault a failed or empty attempt was, by the session's record of refused requests."""
    outcome, refused = last.outcome, last.tape.refused if last.tape else {}
    passed_on = tuple(status for status in refused if _is_engines_fault(status))
    failure = outcome.failure
    silent = failure is None and not last.collected.samples and outcome.empty_reason != "all_truncated"
    if not silent and (failure is None or failure.type not in ("agent_error", "agent_exit")):
        return
    for statuses, kind in _FAULTS:
        wanted = (*passed_on, *statuses) if kind == "engine_error" else statuses
        found = [status for status in wanted if refused.get(status)]
        if found:
            counts = ", ".join(f"{refused[status]} turns answered {status}" for status in found)
            message = f"{counts}; {failure.message}" if failure else f"{counts}; the agent returned without a turn"
            outcome.failure = Failure(type=kind, message=message)
            last.repeatable = kind == "engine_error"
            return


def _is_engines_fault(status: str) -> bool:
    """Whether it was passed on from the engine and is no refusal of the request itself, which is the agent's fault."""
    number = status.removeprefix(ENGINE_PREFIX)
    return number != status and (number >= "500" or number in BUSY_STATUSES)


_FAULTS: tuple[tuple[tuple[str, ...], FailureType], ...] = (
    (ENGINE_STATUSES, "engine_error"),
    ((SESSION_STATUS,), "session_error"),
    ((TURNS_STATUS,), "max_turns"),
)
