"""Live parity: one rollout's agent run again, on its own session path and on the other, against one engine.

A tape's replay proves the session code; a live run also goes through the server, its HTTP answers and the
agent. Three runs are held against each other, exchange by exchange: the batch's own one, the own path
again, and the other path. The first difference says whose it is:

session_path  the same history gave another prompt, other sampling parameters or another seed; or one path
              refused what the other took although the tape's replay does not; or the exchanges are the same and the
              samples are not. Always `differs`.
engine        the same prompt, parameters and seed gave other ids, other log-prob bits, another finish,
              weight version or count of cached tokens. `differs` where the engine is known to repeat itself
              as those runs were made, else `not_comparable`: nothing can be proven with such an engine.
agent         the agent's own request was another one although all answers before were the same: a clock,
              chance, the outside world. `not_comparable`: such an agent cannot be run twice.

Other reasons of `not_comparable`: `agent_result` (its requests repeat, what it returned does not),
`versions_part` (the tape's replay shows that the two versions rightly treat this conversation otherwise
from there on), `needs_version` (its agent needs one version), `run_failed` (a run or the rollout itself
had no engine, no session server or not enough time) and `no_sample`.

A rollout is `equal` with reason `batch_load` where both live runs agree and only the batch's own run
does not, from an engine that is not known to repeat itself under that load.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollout.outcome import Outcome
from rollout.parity.compare import diff_values
from rollout.parity.outputs import compare_outputs
from rollout.parity.projections import PARITY, diff_projected
from rollout.parity.replay import prompt_ids, replay
from rollout.parity.rows import Row
from rollout.parity.verdict import Verdict, VerdictName, judge_rows
from rollout.session.tape import ENGINE_PREFIX, Exchange, Tape
from rollout.tito.renderer import Tito

CHECK = "live"
UNPROVABLE = ("engine_error", "session_error", "deadline", "agent_timeout", "bad_prompt")
"""Failures that say nothing of the two paths: a rollout or a run that has one is `run_failed`."""
_ENGINE_FIELDS = ("finish", "matched", "weight_version", "cached_tokens", "routed_experts", "routed_experts_shape")
_ENGINE_STATUSES = ("502", "503", "504")
_AGENTS_COLUMNS = ("metadata", "reward", "reward_json", "failure.type", "remove_sample")


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """One run of a rollout's agent: its tape, how it ended, and its finished rows."""

    tape: Tape
    outcome: Outcome
    rows: list[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where two runs part. `seq` is the exchange's, `token` one of its sampled ids."""

    kind: Literal["agent", "session_path", "engine"]
    seq: int
    path: str
    token: int | None = None
    max_ulp: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveVerdict:
    """What live parity found of one rollout; `token` and `max_ulp` as in Difference, where an engine differs."""

    verdict: VerdictName
    reason: str | None = None
    paths: list[str] = field(default_factory=list)
    token: int | None = None
    max_ulp: int | None = None


def is_chosen(batch_seed: int, index: int, fraction: float) -> bool:
    """Whether a rollout is among the fraction that is run again.

    Decided by the first 64 bits of blake2b over seed and index alone: the same at every resume, and a
    larger fraction holds all of a smaller one.
    """
    text = b"live" + batch_seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return drawn < fraction * 2**64


def judge_live(
    original: Run, again: Run, other: Run, tito: Tito, *, repeats_live: bool, repeats_in_batch: bool
) -> LiveVerdict:
    """The verdict on three runs of one rollout.

    Args:
        original: the batch's own run, as staged.
        again, other: the live runs on its own version and on the other.
        repeats_live: the engine is known to give the same bits again as the live runs were made.
        repeats_in_batch: likewise under the load of the batch itself.
    """
    for run in (again, other):
        failure = run.outcome.failure
        if failure is not None and failure.type in UNPROVABLE:
            return LiveVerdict(verdict="not_comparable", reason=f"run_failed: {failure.type}: {failure.message}")
    for run, where in ((original, "the batch's run"), (again, "own path again"), (other, "other path")):
        paths = _not_its_sessions(run.tape, tito)
        if paths:
            return LiveVerdict(verdict="differs", reason=f"session_path: {where}, own replay", paths=paths)
    before = first_difference(original, again, tito)
    between = first_difference(again, other, tito)
    if between is not None and between.kind != "engine":
        parting = _parting(again, other, tito)
        if parting is not None and parting[0] <= between.seq:
            return LiveVerdict(verdict="not_comparable", reason=f"versions_part: {parting[1]}")
    parted = [(before, _TWICE), (between, _versions(again, other))]
    for kind, verdict in _WHATEVER_THE_ENGINE.items():
        for found, where in parted:
            if found is not None and found.kind == kind:
                return _as_verdict(found, verdict, where)
    if between is not None:
        return _as_verdict(between, "differs" if repeats_live else "not_comparable", _versions(again, other))
    if before is not None and repeats_in_batch:
        return _as_verdict(before, "differs", _TWICE)
    judged = _judge_samples(again, other, tito)
    if before is not None and judged.verdict == "equal":
        return replace(judged, reason=f"batch_load: {_TWICE}: {before.path}")
    return judged


_TWICE = "batch against own path again"
_WHATEVER_THE_ENGINE: dict[str, VerdictName] = {"session_path": "differs", "agent": "not_comparable"}


def _versions(a: Run, b: Run) -> str:
    return f"{a.tape.settings.version} against {b.tape.settings.version}"


def _as_verdict(found: Difference, verdict: VerdictName, where: str) -> LiveVerdict:
    return LiveVerdict(
        verdict=verdict,
        reason=f"{found.kind}: {where}",
        paths=[found.path],
        token=found.token,
        max_ulp=found.max_ulp,
    )


def first_difference(a: Run, b: Run, tito: Tito) -> Difference | None:
    """The first exchange in which two runs part, and whose doing it is; None: all exchanges are the same.

    Both tapes are such as their own versions replay to the end.
    """
    bodies_a, bodies_b = _bodies(a.tape, tito), _bodies(b.tape, tito)
    for seq, (body_a, body_b) in enumerate(zip(bodies_a, bodies_b, strict=False)):
        asked = diff_values(body_a, body_b, f"exchange[{seq}].body")
        if asked:
            return Difference(kind="agent", seq=seq, path=asked[0])
        found = _exchange_difference(a.tape, b.tape, seq)
        if found is not None:
            return found
    return _ends(a.tape, b.tape)


def _not_its_sessions(tape: Tape, tito: Tito) -> list[str]:
    """How a tape is not what a session of its own version makes; empty where it is. The server's doing, then."""
    stop = replay(tape, version=tape.settings.version, tito=tito).stop
    return [] if stop is None else stop.paths


def _bodies(tape: Tape, tito: Tito) -> list[dict[str, Any]]:
    """What the client sent, exchange by exchange."""
    client = replay(tape, version=tape.settings.version, tito=tito).client
    return [client.body(seq) for seq in range(len(tape.exchanges))]


def _exchange_difference(a: Tape, b: Tape, seq: int) -> Difference | None:
    x, y, where = a.exchanges[seq], b.exchanges[seq], f"exchange[{seq}]"
    asked = diff_values(prompt_ids(a, seq), prompt_ids(b, seq), f"{where}.prompt_ids")
    asked += diff_values(x.settings.get("sampling"), y.settings.get("sampling"), f"{where}.sampling")
    asked += diff_values(x.sampling_seed, y.sampling_seed, f"{where}.sampling_seed")
    if asked:
        return Difference(kind="session_path", seq=seq, path=asked[0])
    outputs = compare_outputs(x.output_ids_O, x.output_log_probs_O, y.output_ids_O, y.output_log_probs_O)
    if not outputs.equal:
        places = [place for place in (outputs.first_log_prob, outputs.first_token) if place is not None]
        return Difference(
            kind="engine", seq=seq, path=f"{where}.{outputs.path}", token=min(places), max_ulp=outputs.max_ulp
        )
    told = [path for name in _ENGINE_FIELDS for path in _field(x, y, name, where)]
    told += diff_values(_spans(x), _spans(y), f"{where}.weight_spans")
    return Difference(kind="engine", seq=seq, path=told[0], max_ulp=0) if told else None


def _field(x: Exchange, y: Exchange, name: str, where: str) -> list[str]:
    return diff_values(getattr(x, name), getattr(y, name), f"{where}.{name}")


def _spans(exchange: Exchange) -> list[list[Any]]:
    return [[span.version, span.start, span.end] for span in exchange.weight_spans]


def _ends(a: Tape, b: Tape) -> Difference | None:
    """All exchanges that both have are the same: does one go on, or was something refused on one side only?"""
    n_a, n_b = len(a.exchanges), len(b.exchanges)
    refused = diff_values(_refused(a), _refused(b), "refused")
    if refused:
        return Difference(kind="session_path", seq=min(n_a, n_b), path=refused[0])
    if n_a != n_b:
        return Difference(kind="agent", seq=min(n_a, n_b), path=f"exchanges: {n_a} != {n_b}")
    return None


def _refused(tape: Tape) -> dict[str, int]:
    """What the session itself refused, by HTTP status; an engine's failures are not its own."""
    return {
        status: n
        for status, n in tape.refused.items()
        if status not in _ENGINE_STATUSES and not status.startswith(ENGINE_PREFIX)
    }


def _parting(a: Run, b: Run, tito: Tito) -> tuple[int, str] | None:
    """From which exchange on replay itself shows the versions to part, and how; None: nowhere."""
    found = []
    for run, version in ((a, b.tape.settings.version), (b, a.tape.settings.version)):
        replayed = replay(run.tape, version=version, tito=tito)
        if replayed.stop is not None:
            found.append((len(replayed.session.nodes), replayed.stop.paths[0]))
    return min(found) if found else None


def _judge_samples(again: Run, other: Run, tito: Tito) -> LiveVerdict:
    """Two runs with the same exchanges: what the session made of them must be the same where replay says so."""
    own = judge_rows(again.tape, again.outcome, again.rows, tito)
    if own.verdict == "equal" and len(again.rows) == len(other.rows) == 1:
        paths = diff_projected(again.rows[0], other.rows[0], PARITY)
        if not paths:
            return LiveVerdict(verdict="equal", max_ulp=0)
        agents = all(_is_the_agents(path) for path in paths)
        reason = "agent_result" if agents else f"session_path: {_versions(again, other)}"
        return LiveVerdict(verdict="not_comparable" if agents else "differs", reason=reason, paths=paths)
    if own.verdict == "equal":
        path = f"samples: {len(again.rows)} != {len(other.rows)}"
        return LiveVerdict(verdict="differs", reason=f"session_path: {_versions(again, other)}", paths=[path])
    return _by_path(own, judge_rows(other.tape, other.outcome, other.rows, tito))


def _is_the_agents(path: str) -> bool:
    """Whether a differing path is of what the agent returned or how it ended, not of what the session made."""
    name = path.split(":", 1)[0].split("[", 1)[0].removeprefix("sample.")
    return name.startswith(_AGENTS_COLUMNS) and not name.startswith("metadata.lifecycle")


def _by_path(own: Verdict, other: Verdict) -> LiveVerdict:
    """The versions differ on the whole, as their replays do: then each run carries its own proof."""
    for found in (own, other):
        if found.verdict == "differs":
            return LiveVerdict(verdict="differs", reason=f"session_path: {found.reason}", paths=found.paths)
    for found in (own, other):
        if found.verdict == "not_comparable":
            return LiveVerdict(verdict="not_comparable", reason=found.reason)
    return LiveVerdict(verdict="equal_by_path", reason=own.reason or other.reason, max_ulp=0)
