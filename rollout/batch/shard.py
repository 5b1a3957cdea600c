"""One shard: its inputs to the two tables that are staged.

Rollouts start in the order of their index, as many at once as the engine has slots; the slots belong
to the engine, so the next shard's first rollouts start while the last ones of this shard still run.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout import process
from rollout.agents.openai_client import close_connections
from rollout.columns import SCHEMA_VERSION, BatchStamp, samples_to_table
from rollout.config import BatchConfig
from rollout.errors import Failure
from rollout.generate import RolloutResult, RunContext, attempt_rollout, conclude
from rollout.identity import resolve_rollout_key
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.parity.projections import payload_digest
from rollout.sample import Sample, Status
from rollout.session.client import SessionClient
from rollout.session.settings import SessionSettings
from rollout.session.tape import Tape, tape_to_table
from rollout.tape_columns import TRAJECTORIES_SCHEMA

TOKEN_VARIABLE = "ROLLOUT_DRIVER_TOKEN"
"""Environment variable in which the session server finds the driver's token."""

Progress = Callable[[RolloutResult], None]
"""Called once per finished rollout, in the order in which they finish."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardResult:
    """A shard's rows and counts.

    samples       SAMPLES_SCHEMA, by (group_index, rollout_key, sibling)
    trajectories  TRAJECTORIES_SCHEMA, by (index, seq); every rollout has at least its session's row
    counts        `rollouts` and `samples` by status, `failures` by type, and numbers: `turns`,
                  `tokens_sampled`, `engine_seconds`, `repeated` (rollouts that took several attempts)
    """

    samples: pa.Table
    trajectories: pa.Table
    counts: dict[str, Any]


async def run_shard(
    inputs: Sequence[RolloutInput],
    *,
    context: RunContext,
    stamp: BatchStamp,
    refused: Sequence[tuple[RolloutInput, Failure]] = (),
    progress: Progress | None = None,
) -> ShardResult:
    """Run every input to its rows. Cancelling ends the rollouts in flight and deletes their sessions.

    Args:
        inputs: a shard's, with unique rollout keys (the plan sees to that).
        stamp: the columns that only the batch knows.
        refused: rollouts of refused prompt rows; they get their rows without a session.
    """
    results = [refused_result(given, failure, context) for given, failure in refused]
    if progress is not None:
        for result in results:
            progress(result)
    waiting = iter(sorted(inputs, key=lambda given: given.index))

    async def work() -> None:
        for given in waiting:
            async with context.slots:
                last = await attempt_rollout(given, context)
            result = await conclude(last, context)
            results.append(result)
            if progress is not None:
                progress(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(len(inputs), context.config.concurrency)):
            group.create_task(work())
    return shard_result(results, stamp)


def refused_result(given: RolloutInput, failure: Failure, context: RunContext) -> RolloutResult:
    """A rollout that never ran, because its prompt row was refused (skip_bad_prompts)."""
    outcome = Outcome(input=given, attempt=0, session_version=context.config.session_version, failure=failure)
    return RolloutResult(
        samples=finish([], outcome), tape=None, outcome=outcome, turns=0, sampled_tokens=0, engine_seconds=0.0
    )


def shard_result(results: Sequence[RolloutResult], stamp: BatchStamp) -> ShardResult:
    """The rows of finished rollouts, whatever order they finished in."""
    ordered = sorted(results, key=lambda result: result.outcome.input.index)
    rows = sorted((sample for result in ordered for sample in result.samples), key=_row_key)
    digests = [payload_digest(row) for row in rows]
    return ShardResult(
        samples=samples_to_table(rows, stamp, digests),
        trajectories=trajectories(ordered, stamp.batch_id),
        counts=count(ordered),
    )


def _row_key(sample: Sample) -> tuple[int, int, int]:
    assert sample.group_index is not None and sample.index is not None
    return sample.group_index, resolve_rollout_key(sample.rollout_id, sample.index), sample.sibling


def trajectories(results: Sequence[RolloutResult], batch_id: str) -> pa.Table:
    """The tapes as rows of the trajectories table, in the given order."""
    tables = [TRAJECTORIES_SCHEMA.empty_table(), *(_trajectory(result, batch_id) for result in results)]
    return pa.concat_tables(tables).combine_chunks()


def _trajectory(result: RolloutResult, batch_id: str) -> pa.Table:
    outcome = result.outcome
    tape = result.tape or _blank_tape(outcome)
    table = tape_to_table(tape, outcome.to_json())
    given = {
        "batch_id": batch_id,
        "index": outcome.input.index,
        "attempt": outcome.attempt,
        "schema_version": SCHEMA_VERSION,
    }
    arrays = [
        pa.repeat(pa.scalar(given[column.name], column.type), table.num_rows)
        if column.name in given
        else table.column(column.name)
        for column in TRAJECTORIES_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=TRAJECTORIES_SCHEMA)


def _blank_tape(outcome: Outcome) -> Tape:
    """The session's row of a rollout whose tape could not be fetched; it says so by its empty id."""
    return Tape(session_id="", settings=SessionSettings(version=outcome.session_version))


def count(results: Sequence[RolloutResult]) -> dict[str, Any]:
    """What the shard's manifest says of it; see ShardResult."""
    samples = [sample for result in results for sample in result.samples]
    failures = [result.samples[0].failure for result in results]
    statuses = [Status.FAILED if result.samples[0].failure else result.samples[0].status for result in results]
    return {
        "rollouts": _tally(statuses),
        "samples": _tally(sample.status for sample in samples),
        "failures": _tally(failure.type for failure in failures if failure),
        "turns": sum(result.turns for result in results),
        "tokens_sampled": sum(result.sampled_tokens for result in results),
        "engine_seconds": sum(result.engine_seconds for result in results),
        "repeated": sum(result.outcome.attempt > 0 for result in results),
    }


def _tally(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(str(value) for value in values).items()))


@asynccontextmanager
async def session_server(
    engine_url: str, tokenizer: Path, config: BatchConfig, *, log: Path
) -> AsyncIterator[SessionClient]:
    """The worker's own session server, a child process on loopback, and the driver's client of it.

    Only this client and the sessions' own keys are let in: the driver's token is made up here.

    Raises:
        ChildFailed: it did not start; the message has the last lines of `log`.
    """
    token = secrets.token_hex(16)
    argv = [sys.executable, "-m", "rollout.session.server", "--engine", engine_url, "--tokenizer", str(tokenizer)]
    argv += ["--renderer", config.renderer, "--driver-token-env", TOKEN_VARIABLE]
    argv += ["--enable-thinking"] if config.enable_thinking else []
    child = await process.start(argv, log=log, env={TOKEN_VARIABLE: token})
    try:
        async with SessionClient(child.url, driver_token=token) as client:
            yield client
    finally:
        await close_connections()
        await asyncio.to_thread(child.stop)
