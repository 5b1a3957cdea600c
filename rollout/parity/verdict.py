"""The verdict on one rollout, from its tape alone.

1. Replayed on its own version it must give the staged rows, every column that the rollout decides;
   else `differs`, whatever comes below. Rows that are right under a stale payload_digest are
   `differs` too, with reason `digest` and no path: no column of the rollout is wrong, but what
   names the row is, and a reader that trusts it would take two rows for one or one for two.
2. The whole tape on the other version: one sample on both sides, equal under `parity` -> `equal`.
3. Otherwise each sample's chain of exchanges, alone on the other version, must give that one sample,
   equal under `parity` with its mask as it was before the finisher -> `equal_by_path`; the reason
   says how the whole differed. Of several samples rollout_id and rollout_key are left out: by the
   identity rule a rollout with several has another one than a chain alone.
4. `not_comparable` only for `no_sample` and `truncated_extension`; anything else is `differs` with
   every differing path. A turn that v2 had to render as a new root begins a chain of its own here
   and is proven like any, so `unextendable` is never needed.

Paths read staged (or own) != replayed. Of a rollout with several rows they begin with `sample[k]`,
k the sibling. A reason's words up to a colon are its kind, by which summaries count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rollout.errors import SessionRefused
from rollout.identity import SessionVersion
from rollout.outcome import Outcome, finish
from rollout.parity.compare import diff_rows
from rollout.parity.projections import PARITY, diff_projected, row_digest
from rollout.parity.replay import Stop, replay
from rollout.parity.rows import SAMPLE_COLUMNS, Row, row_of
from rollout.sample import Sample
from rollout.session.tape import Tape
from rollout.tito.renderer import Tito

VerdictName = Literal["equal", "equal_by_path", "not_comparable", "differs"]
_PARITY_OF_ONE_OF_SEVERAL = tuple(name for name in PARITY if name not in ("rollout_id", "rollout_key"))
OTHER: dict[SessionVersion, SessionVersion] = {"v1": "v2", "v2": "v1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What parity found. `versions` is own/other, `seconds` the wall time of all its replays."""

    verdict: VerdictName
    reason: str | None = None
    paths: list[str] = field(default_factory=list)
    versions: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """What one replay gave: finished rows, or where it stopped. `n_samples` are the session's own."""

    rows: list[Row] = field(default_factory=list)
    n_samples: int = 0
    stop: Stop | None = None


def judge(tape: Tape, outcome: Outcome, staged: Sequence[Sample], tito: Tito) -> Verdict:
    """The verdict on one rollout whose staged rows were read back as samples, in sibling order."""
    rows = [row_of(sample) for sample in staged]
    for row in rows:
        del row["rollout_key"]  # made from the row just now: it would show a wrong rollout_id twice
    return judge_rows(tape, outcome, rows, tito)


def judge_rows(tape: Tape, outcome: Outcome, staged: Sequence[Row], tito: Tito) -> Verdict:
    """As `judge`, from rows of the table: `rollout_key` and `payload_digest` are checked where they stand."""
    started = time.perf_counter()
    found = _judge(tape, outcome, staged, tito)
    own = tape.settings.version
    return replace(found, versions=f"{own}/{OTHER[own]}", seconds=time.perf_counter() - started)


def _judge(tape: Tape, outcome: Outcome, staged: Sequence[Row], tito: Tito) -> Verdict:
    version = tape.settings.version
    own = take(tape, outcome, tito, version=version)
    paths = own.stop.paths if own.stop else _diff_staged(staged, own.rows)
    if paths:
        return Verdict(verdict="differs", reason="own replay", paths=paths)
    if any("payload_digest" in row and row["payload_digest"] != row_digest(row) for row in staged):
        return Verdict(verdict="differs", reason="digest: payload_digest is not that of the row")
    if own.n_samples == 0:
        return Verdict(verdict="not_comparable", reason="no_sample")
    reason = _whole(tape, outcome, own, tito)
    if reason is None:
        return Verdict(verdict="equal")
    return _by_path(tape, outcome, own, tito, reason)


def take(
    tape: Tape, outcome: Outcome, tito: Tito, *, version: SessionVersion, only: Sequence[int] | None = None
) -> Take:
    """Replay on `version` (the exchanges `only`, or all) and finish the samples as the driver did."""
    replayed = replay(tape, version=version, tito=tito, only=only)
    if replayed.stop is not None:
        return Take(stop=replayed.stop)
    try:
        own = version == tape.settings.version  # only its own version's rows are compared with the staged drift
        reply = replayed.session.samples(max_seq_len=tape.settings.max_seq_len, drift=own)
    except SessionRefused as refusal:
        return Take(stop=Stop.refused("samples", version, refusal))
    n_samples = len(reply.samples)
    ended = replace(outcome, session_version=version, empty_reason=reply.empty_reason)
    return Take(rows=[row_of(sample) for sample in finish(reply.samples, ended)], n_samples=n_samples)


def _diff_staged(staged: Sequence[Row], replayed: Sequence[Row]) -> list[str]:
    paths = []
    if len(staged) != len(replayed):
        paths.append(f"samples: {len(staged)} != {len(replayed)}")
    for position, (left, right) in enumerate(zip(staged, replayed, strict=False)):
        columns = (*SAMPLE_COLUMNS, "rollout_key") if "rollout_key" in left else SAMPLE_COLUMNS
        paths += diff_rows(left, right, columns, prefix=row_prefix(position, max(len(staged), len(replayed))))
    return paths


def row_prefix(position: int, n_rows: int) -> str:
    """How the paths of one of `n_rows` rows begin."""
    return "sample" if n_rows == 1 else f"sample[{position}]"


def _whole(tape: Tape, outcome: Outcome, own: Take, tito: Tito) -> str | None:
    """None if the whole tape gives the one sample on the other version too; else how it differed."""
    version = tape.settings.version
    if own.n_samples > 1:
        return f"several samples: {version} gave {own.n_samples}, {OTHER[version]} gives one"
    other = take(tape, outcome, tito, version=OTHER[version])
    if other.stop:
        return f"{other.stop.kind}: {other.stop.paths[0]}"
    if other.n_samples != 1:
        return f"several samples: {version} gave 1, {OTHER[version]} gave {other.n_samples}"
    paths = diff_projected(own.rows[0], other.rows[0], PARITY)
    if not paths:
        return None
    return f"payload: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _by_path(tape: Tape, outcome: Outcome, own: Take, tito: Tito, reason: str) -> Verdict:
    other = OTHER[tape.settings.version]
    columns = PARITY if own.n_samples == 1 else _PARITY_OF_ONE_OF_SEVERAL
    paths: list[str] = []
    cut = False
    for position, row in enumerate(own.rows):
        prefix = row_prefix(position, len(own.rows))
        chain = chain_of(tape, row)
        alone = take(tape, outcome, tito, version=other, only=chain)
        if alone.stop and alone.stop.truncated_extension:
            cut = True
        elif alone.stop:
            paths += [f"{prefix}: {path}" for path in alone.stop.paths]
        elif alone.n_samples != 1:
            paths.append(f"{prefix}: its chain alone gives {alone.n_samples} samples on {other}")
        else:
            paths += diff_projected(_before_finisher(tape, row, chain), alone.rows[0], columns, prefix=prefix)
    if paths:
        return Verdict(verdict="differs", reason=reason, paths=paths)
    if cut:
        return Verdict(verdict="not_comparable", reason="truncated_extension")
    return Verdict(verdict="equal_by_path", reason=reason)


def chain_of(tape: Tape, row: Row) -> list[int]:
    """The exchanges behind a sample: its leaf's root path (v2), or what was not rolled back (v1)."""
    if tape.settings.version == "v2":
        return list(row["leaf_path"])
    return [exchange.seq for exchange in tape.exchanges if not exchange.rolled_back]


def _before_finisher(tape: Tape, row: Row, chain: Sequence[int]) -> Row:
    """A v2 row with the mask of its chain alone: 1 on every sampled id, whoever owns it."""
    if tape.settings.version == "v1":
        return row
    exchanges = [tape.exchanges[seq] for seq in chain]
    mask = [np.ones(len(exchanges[0].output_ids_O), np.int8)]
    for exchange in exchanges[1:]:
        mask += (np.zeros(len(exchange.appended_ids_P), np.int8), np.ones(len(exchange.output_ids_O), np.int8))
    return {**row, "loss_mask": np.concatenate(mask)[: row["response_length"]]}
