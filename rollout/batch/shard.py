"""One shard: its inputs to the two tables that are staged.

Rollouts start in the order of their index, as many at once as the engine has slots; the slots belong
to the engine, so the next shard's first rollouts start while the last ones of this shard still run.
Each finished rollout's rows are made at once and go to the shard's spool, if it has one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout.batch.spool import RolloutRows, Spool
from rollout.columns import SAMPLES_SCHEMA, SCHEMA_VERSION, BatchStamp, samples_to_table
from rollout.errors import Failure
from rollout.generate import RolloutResult, RunContext, attempt_rollout, conclude
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.parity.projections import payload_digest
from rollout.sample import Status
from rollout.session.settings import SessionSettings
from rollout.session.tape import Tape, tape_to_table
from rollout.tape_columns import TRAJECTORIES_SCHEMA

TRIED_AGAIN = ("engine_error", "session_error")
"""Failures that no spool keeps: they say nothing of the rollout, and the children may be back at a restart."""

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
    spool: Spool | None = None,
    progress: Progress | None = None,
) -> ShardResult:
    """Run every input to its rows. Cancelling ends the rollouts in flight and deletes their sessions.

    Args:
        inputs: a shard's, with unique rollout keys (the plan sees to that).
        stamp: the columns that only the batch knows, for the rows that are made here.
        refused: rollouts of refused prompt rows; they get their rows without a session.
        spool: inputs that are in it are not run again: their rows stay as they were made. The others go
            there as they finish, but for failures of engine and session server, which a restart tries again.
        progress: ends the shard by raising; what it was called with is in the spool by then.
    """
    rows = list(spool.rollouts) if spool is not None else []
    finished = {kept.index for kept in rows}
    waiting = iter(sorted((one for one in inputs if one.index not in finished), key=lambda given: given.index))

    async def keep(result: RolloutResult) -> None:
        made = await asyncio.to_thread(_make_rows, result, stamp, spool)
        rows.append(made)
        if progress is not None:
            progress(result)

    for given, failure in refused:
        if given.index not in finished:
            await keep(refused_result(given, failure, context))

    async def work() -> None:
        for given in waiting:
            async with context.slots:
                last = await attempt_rollout(given, context)
            await keep(await conclude(last, context))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(len(inputs), context.config.concurrency)):
            group.create_task(work())
    return await asyncio.to_thread(join_rows, rows)


def refused_result(given: RolloutInput, failure: Failure, context: RunContext) -> RolloutResult:
    """A rollout that never ran, because its prompt row was refused (skip_bad_prompts)."""
    outcome = Outcome(input=given, attempt=0, session_version=context.config.session_version, failure=failure)
    return RolloutResult(
        samples=finish([], outcome), tape=None, outcome=outcome, turns=0, sampled_tokens=0, engine_seconds=0.0
    )


def shard_result(results: Sequence[RolloutResult], stamp: BatchStamp) -> ShardResult:
    """The rows of finished rollouts, whatever order they finished in."""
    return join_rows([rollout_rows(result, stamp) for result in results])


def _make_rows(result: RolloutResult, stamp: BatchStamp, spool: Spool | None) -> RolloutRows:
    rows, failure = rollout_rows(result, stamp), result.samples[0].failure
    if spool is not None and (failure is None or failure.type not in TRIED_AGAIN):
        spool.append(rows)
    return rows


def rollout_rows(result: RolloutResult, stamp: BatchStamp) -> RolloutRows:
    """The rows of one finished rollout, siblings in order and the tape by seq."""
    digests = [payload_digest(sample) for sample in result.samples]
    return RolloutRows(
        samples=_one_batch(samples_to_table(result.samples, stamp, digests)),
        trajectories=_one_batch(_trajectory(result, stamp.batch_id)),
    )


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches()
    return batch


def join_rows(rows: Sequence[RolloutRows]) -> ShardResult:
    """A shard's tables and counts from its rollouts' rows, in any order."""
    by_key = sorted(rows, key=_row_key)
    by_index = sorted(rows, key=lambda one: one.index)
    samples = pa.Table.from_batches([one.samples for one in by_key], SAMPLES_SCHEMA).combine_chunks()
    tapes = pa.Table.from_batches([one.trajectories for one in by_index], TRAJECTORIES_SCHEMA).combine_chunks()
    return ShardResult(samples=samples, trajectories=tapes, counts=count(samples, tapes))


def _row_key(rows: RolloutRows) -> tuple[int, int]:
    group, key = (rows.samples.column(name)[0].as_py() for name in ("group_index", "rollout_key"))
    return group, key


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


def count(samples: pa.Table, trajectories: pa.Table) -> dict[str, Any]:
    """What the shard's manifest says of it; see ShardResult."""
    rows = samples.select(["sibling", "status", "attempt", "failure"]).to_pylist()
    rollouts = [row for row in rows if row["sibling"] == 0]
    exchanges = trajectories.filter(pc.greater_equal(trajectories.column("seq"), 0))
    return {
        "rollouts": _tally(str(Status.FAILED) if row["failure"] else row["status"] for row in rollouts),
        "samples": _tally(row["status"] for row in rows),
        "failures": _tally(row["failure"]["type"] for row in rollouts if row["failure"]),
        "turns": exchanges.num_rows,
        "tokens_sampled": pc.sum(pc.list_value_length(exchanges.column("output_ids"))).as_py() or 0,
        "engine_seconds": sum(exchanges.column("engine_seconds").to_pylist()),
        "repeated": sum(row["attempt"] > 0 for row in rollouts),
    }


def _tally(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))
