"""Parity of staged tables: exactly one verdict per rollout, their summary, and whether a batch may be published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout.columns import SCHEMA_VERSION
from rollout.errors import ParityFailed, describe
from rollout.identity import sample_id
from rollout.lake.schema import rows_to_table, take_rows
from rollout.outcome import Outcome
from rollout.parity.live import CHECK as LIVE
from rollout.parity.rows import rows_of
from rollout.parity.verdict import Verdict, judge_rows, row_prefix
from rollout.session.tape import Tape, table_to_tape
from rollout.tito.renderer import Tito

CHECK = "replay"
MAX_NAMED = 3
"""Rollouts that a refusal to publish names; the rest is counted."""


def validate_tables(
    samples: pa.Table,
    trajectories: pa.Table,
    tito: Tito,
    *,
    batch_id: str,
    engine: str,
    created_at: datetime,
    indexes: Iterable[int] | None = None,
) -> pa.Table:
    """One row of the parity table per rollout, by index, from staged tables as they were read back.

    Args:
        engine: name of the engine that the rollouts ran on (column engine_a).
        indexes: the planned rollouts, where they are known: one without rows or tape is `differs`, and
            so is any other that has some.
    """
    rows, tapes = _by_index(samples), _by_index(trajectories)
    planned = {*rows, *tapes} if indexes is None else set(indexes)
    found = []
    for index in sorted({*rows, *tapes, *planned}):
        if index in planned:
            verdict = _verdict(rows.get(index), tapes.get(index), tito, batch_id)
        else:
            verdict = Verdict(verdict="differs", reason="not planned: no rollout of this shard has this index")
        key = _key(rows.get(index), index)
        found.append(_parity_row(verdict, index, key, batch_id=batch_id, engine=engine, created_at=created_at))
    return rows_to_table(found, "parity")


def _by_index(table: pa.Table) -> dict[int, pa.Table]:
    places: dict[int, list[int]] = {}
    for position, index in enumerate(table.column("index").to_pylist()):
        places.setdefault(index, []).append(position)
    return {index: take_rows(table, positions) for index, positions in places.items()}


def _key(rows: pa.Table | None, index: int) -> int:
    """The rollout_key of a parity row: as the samples have it, else the index."""
    return index if rows is None else int(rows.column("rollout_key")[0].as_py())


def _verdict(rows: pa.Table | None, exchanges: pa.Table | None, tito: Tito, batch_id: str) -> Verdict:
    """The verdict on one rollout from its rows of both tables; what cannot be read or replayed differs."""
    if exchanges is None:
        return Verdict(verdict="differs", reason="no tape: the rollout's trajectory is missing")
    if rows is None:
        return Verdict(verdict="differs", reason="no rows: the rollout's samples are missing")
    try:
        tape, outcome = read_tape(exchanges)
        staged = sorted(rows_of(rows), key=lambda row: int(row["sibling"]))
        found = judge_rows(tape, outcome, staged, tito)
        # Last, because a wrong key has a wrong name too, and that path alone says what is wrong.
        paths = [] if found.verdict == "differs" else _diff_names(rows, exchanges, batch_id)
        return replace(found, verdict="differs", reason="names", paths=paths) if paths else found
    except Exception as error:
        # One broken rollout must not hide the verdicts on the others, and proves nothing.
        return Verdict(verdict="differs", reason=f"broken: {describe(error)}")


def _diff_names(rows: pa.Table, exchanges: pa.Table, batch_id: str) -> list[str]:
    """Paths of names that do not belong to the row: its batch, and the sample_id that follows from its key."""
    columns = [rows.column(name).to_pylist() for name in ("batch_id", "rollout_key", "sibling", "sample_id")]
    paths = []
    for position, (batch, key, sibling, name) in enumerate(zip(*columns, strict=True)):
        prefix = row_prefix(position, rows.num_rows)
        if batch != batch_id:
            paths.append(f"{prefix}.batch_id: {batch!r} != {batch_id!r}")
        elif name != sample_id(batch, key, sibling):
            paths.append(f"{prefix}.sample_id: {name!r} != {sample_id(batch, key, sibling)!r}")
    foreign = sorted({*exchanges.column("batch_id").to_pylist()} - {batch_id})
    return paths + [f"tape.batch_id: {batch!r} != {batch_id!r}" for batch in foreign]


def read_tape(table: pa.Table) -> tuple[Tape, Outcome]:
    """Tape and outcome of one rollout from its rows of the trajectories table.

    Raises:
        ValueError: rows of several attempts or sessions, an exchange that is missing, there twice or
            extends a later one, or an outcome that is missing or of another index or attempt.
    """
    names = {tuple(row.values()) for row in table.select(["index", "attempt", "session_id"]).to_pylist()}
    if len(names) != 1:
        raise ValueError("its rows are of several sessions")
    if sorted(table.column("seq").to_pylist()) != list(range(-1, table.num_rows - 1)):
        raise ValueError("an exchange is missing or there twice")
    tape, stored = table_to_tape(table)
    if stored is None:
        raise ValueError("its session's row has no outcome")
    for exchange in tape.exchanges:
        # A circle of parents would never end.
        if exchange.parent is not None and not 0 <= exchange.parent < exchange.seq:
            raise ValueError(f"exchange {exchange.seq} extends {exchange.parent}, which does not come before it")
    outcome = Outcome.from_json(stored)
    ((index, attempt, _),) = names
    if (index, attempt) != (outcome.input.index, outcome.attempt):
        raise ValueError(
            f"its rows are of index {index}, attempt {attempt}, its outcome of {outcome.input.index}, {outcome.attempt}"
        )
    return tape, outcome


def _parity_row(verdict: Verdict, index: int, key: int, **stamp: Any) -> dict[str, Any]:
    return {
        "batch_id": stamp["batch_id"],
        "index": index,
        "rollout_key": key,
        "check": CHECK,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "paths": verdict.paths,
        "versions": verdict.versions,
        "engine_a": stamp["engine"],
        "seconds": verdict.seconds,
        "created_at": stamp["created_at"],
        "schema_version": SCHEMA_VERSION,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ParitySummary:
    """Counts of verdicts and of reasons by kind; `share` is equal and equal_by_path among rollouts with a sample.

    `share` is null where no rollout has a sample. `seconds` is the sum over the rollouts. All of that is of the
    check `replay`; `live` and `live_reasons` have the verdicts and reasons of the check `live`.
    """

    n_rollouts: int
    verdicts: dict[str, int]
    reasons: dict[str, dict[str, int]]
    share: float | None
    seconds: float
    live: dict[str, int] = field(default_factory=dict)
    live_reasons: dict[str, dict[str, int]] = field(default_factory=dict)


def summarize(parity: pa.Table) -> ParitySummary:
    """The summary of a batch's parity rows."""
    replayed = _of(parity, CHECK)
    verdicts, kinds = _counts(replayed)
    live, live_kinds = _counts(_of(parity, LIVE))
    n_with_sample = replayed.num_rows - kinds.get("not_comparable", {}).get("no_sample", 0)
    n_equal = verdicts.get("equal", 0) + verdicts.get("equal_by_path", 0)
    return ParitySummary(
        n_rollouts=replayed.num_rows,
        verdicts=verdicts,
        reasons=kinds,
        share=n_equal / n_with_sample if n_with_sample else None,
        seconds=float(pc.sum(replayed.column("seconds")).as_py() or 0.0),
        live=live,
        live_reasons=live_kinds,
    )


def _of(parity: pa.Table, check: str) -> pa.Table:
    return parity.filter(pc.equal(parity.column("check"), check))


def _counts(parity: pa.Table) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Verdicts, and each verdict's reasons by kind, counted and in order."""
    verdicts: list[str] = parity.column("verdict").to_pylist()
    reasons: list[str | None] = parity.column("reason").to_pylist()
    kinds: dict[str, Counter[str]] = {}
    for verdict, reason in zip(verdicts, reasons, strict=True):
        if reason is not None:
            kinds.setdefault(verdict, Counter())[reason.split(":", 1)[0]] += 1
    ordered = {verdict: dict(sorted(counter.items())) for verdict, counter in sorted(kinds.items())}
    return dict(sorted(Counter(verdicts).items())), ordered


def require_parity(parity: pa.Table, *, min_equal: float) -> ParitySummary:
    """The summary of a batch that may be published.

    Args:
        min_equal: share of equal and equal_by_path among rollouts with a sample, at least
            (`parity_min_equal`).

    Raises:
        ParityFailed: a rollout differs, replayed or live (its first differing paths are named), or the share is
            below.
    """
    summary = summarize(parity)
    for check, name in ((CHECK, "parity"), (LIVE, "live parity")):
        rows = _of(parity, check)
        _refuse_differing(name, rows.filter(pc.equal(rows.column("verdict"), "differs")).to_pylist(), rows.num_rows)
    if summary.share is not None and summary.share < min_equal:
        counts = ", ".join(f"{kind} {n}" for kind, n in summary.reasons.get("not_comparable", {}).items())
        raise ParityFailed(
            f"parity: {summary.share:.4f} of the rollouts with a sample are equal, "
            f"parity_min_equal is {min_equal} (not comparable: {counts})"
        )
    return summary


def _refuse_differing(name: str, differing: list[dict[str, Any]], n_rollouts: int) -> None:
    if differing:
        named = "; ".join(_name(row) for row in differing[:MAX_NAMED])
        more = f"; and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        raise ParityFailed(f"{name}: {len(differing)} of {n_rollouts} rollouts differ: {named}{more}")


def _name(row: dict[str, Any]) -> str:
    paths, name = row["paths"], f"rollout {row['index']}"
    if not paths:
        return f"{name}: {row['reason']}"
    whose = f"{row['reason']}: " if row["check"] == LIVE else ""
    return f"{name}: {whose}{paths[0]}" + (f" (+{len(paths) - 1} paths)" if len(paths) > 1 else "")
