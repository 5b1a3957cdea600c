"""The flow that compares a published batch with another engine, records it and leaves a report with a plot."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.stopping import stoppable
from rollout.batch.against import Progress
from rollout.batch.spool import SPOOLS
from rollout.batch.view import view_batch
from rollout.errors import BadInput
from rollout.home import state_home
from rollout.parity.cross_report import CrossReport
from tasks.cross import ask_engine, record_verdicts, report_comparison
from tasks.plan import refuse_relative_in_worker

MAX_ROLLOUTS = 1_000_000_000
"""Above any batch, and within the 64 bits beyond which Prefect's server answers 500 (prefect#15031)."""

told: ContextVar[Progress | None] = ContextVar("told_of_comparison", default=None)
"""Who is told how far a comparison is, where somebody in this process wants to know."""

compared: ContextVar[list[CrossReport] | None] = ContextVar("compared", default=None)
"""Where this process's own reports are left, for the command that started the flow."""


@flow(name="rollout-cross-engine", persist_result=False)
@stoppable
async def cross_engine(
    batch: str,
    against: str,
    lake: str = "./lake",
    rollouts: Annotated[int | None, Field(ge=1, le=MAX_ROLLOUTS)] = None,
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 1,
) -> dict[str, Any]:
    """Ask another engine the recorded turns of a published batch, and say where tokens and log-probs move.

    Args:
        batch: Batch id of a published batch.
        against: URL of the engine to compare with (SGLang's /generate).
        lake: Lake: a local path or s3://bucket/prefix.
        rollouts: Compare so many at most, spread evenly over the batch; null: all.
        concurrency: Turns in flight at the engine; 1 where it repeats itself only alone.
    """
    refuse_relative_in_worker(lake=lake)
    view = view_batch(lake, batch, state_home() / SPOOLS)
    if view.status not in ("published", "released"):
        raise BadInput(f"batch {batch} is {view.status}: only a published batch's comparison can be recorded")
    report = await ask_engine(view, against, rollouts, concurrency, told.get())
    await record_verdicts(view, report)
    await report_comparison(report)
    if (reports := compared.get()) is not None:
        reports.append(report)
    return report.to_json()
