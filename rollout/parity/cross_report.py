"""What a comparison with another engine found, summed over its rollouts; in numbers, words, bars and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.markdown import table
from rollout.parity.cross import CrossVerdict
from rollout.parity.ulp import FAR, Unit
from rollout.plot import Chart
from rollout.plot import svg as draw

BAR = 40
"""Characters of the longest bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Log-probs whose distance is `low` to `high` ULP, both counted."""

    low: int
    high: int
    n: int

    @property
    def label(self) -> str:
        if self.low == FAR:
            return "NaN"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(kw_only=True, slots=True)
class CrossReport:
    """A batch's tapes (`engine_a`) against another engine (`engine_b`): descriptions of both, and counts.

    `ulps` has the shared ids' log-probs by unit (rollout.parity.ulp) and distance. `n_rollouts` are those of
    the batch, `verdicts` those compared.
    """

    batch_id: str
    engine_a: str
    engine_b: str
    n_rollouts: int
    verdicts: list[CrossVerdict] = field(default_factory=list)
    ulps: dict[Unit, Counter[int]] = field(default_factory=dict)

    def add(self, found: CrossVerdict) -> None:
        """Count a rollout; its own distances are kept in the sum alone."""
        for unit, counted in found.ulps.items():
            self.ulps.setdefault(unit, Counter()).update(counted)
        found.ulps = {}
        self.verdicts.append(found)
        only_zeros = [unit for unit, counted in self.ulps.items() if not counted.keys() - {0}]
        if len(self.ulps) == 2 and only_zeros:  # no distance is one in either unit
            same = self.ulps.pop(only_zeros[0])
            next(iter(self.ulps.values())).update(same)

    @property
    def differs(self) -> bool:
        return any(found.verdict == "differs" for found in self.verdicts)

    def counts(self) -> dict[str, int]:
        """Rollouts by verdict, those that differ by what does."""
        names = Counter(
            found.verdict if found.verdict == "equal" else f"{found.verdict}: {(found.reason or '').split(':')[0]}"
            for found in self.verdicts
        )
        return dict(sorted(names.items()))

    def total(self, name: str) -> int:
        """Sum of a count of CrossVerdict over the rollouts."""
        return sum(getattr(found, name) for found in self.verdicts)

    def histogram(self, unit: Unit) -> list[Bin]:
        """The distances in bins that double: 0, 1, 2-3, 4-7, ...; empty ones in between are there."""
        counted: Counter[int] = Counter()
        for distance, n in self.ulps.get(unit, Counter()).items():
            counted[64 if distance == FAR else distance.bit_length()] += n
        doubling = range(max((k for k in counted if k < 64), default=-1) + 1)
        bins = [Bin(low=2**k // 2, high=max(2**k - 1, 0), n=counted[k]) for k in doubling]
        return [*bins, Bin(low=FAR, high=FAR, n=counted[64])] if counted[64] else bins

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_id": self.batch_id,
            "engine_a": self.engine_a,
            "engine_b": self.engine_b,
            "rollouts": self.n_rollouts,
            "compared": len(self.verdicts),
            "verdicts": self.counts(),
            "turns": self.total("n_turns"),
            "turns_parted": self.total("n_turns_parted"),
            "tokens": self.total("n_tokens"),
            "tokens_shared": self.total("n_shared"),
            "largest_difference": max((found.largest for found in self.verdicts), default=0.0),
            "max_ulp": max((found.max_ulp or 0 for found in self.verdicts), default=0),
            "histogram": {
                unit: [{"low": b.low, "high": b.high, "tokens": b.n} for b in self.histogram(unit)]
                for unit in sorted(self.ulps)
            },
        }


def headline(report: CrossReport) -> list[tuple[str, str]]:
    """The report's sums as (name, value)."""
    facts = report.to_json()
    shared, tokens = facts["tokens_shared"], facts["tokens"]
    same = sum(counted[0] for counted in report.ulps.values())
    return [
        ("recorded by", report.engine_a),
        ("asked again", report.engine_b),
        ("rollouts", f"{facts['compared']} of {facts['rollouts']}, {facts['turns']} turns"),
        ("verdicts", ", ".join(f"{name} {n}" for name, n in facts["verdicts"].items()) or "none"),
        ("tokens", f"{shared} of {tokens} before a turn's first other token; {facts['turns_parted']} turns part"),
        (
            "log-probs",
            f"{same} of {shared} at distance 0; at most {facts['max_ulp']} ULP, {facts['largest_difference']:.3g} nats",
        ),
    ]


def bars(bins: Sequence[Bin]) -> list[tuple[str, str, str]]:
    """A line per bin: its label, how many, and a bar as long as that is of the largest bin."""
    most = max((one.n for one in bins), default=0)
    return [(one.label, str(one.n), "█" * _length(one.n, most)) for one in bins]


def _length(n: int, most: int) -> int:
    """Nothing for none, and at least one character for some."""
    return 0 if n == 0 else max(1, round(BAR * n / most))


def markdown(report: CrossReport, *, most: int = 50) -> str:
    """The report as Prefect shows it: sums, the histogram as a table with bars, and the rollouts that differ."""
    lines = [f"# {report.batch_id} against another engine", "", *table(["", ""], headline(report))]
    for unit in sorted(report.ulps):
        lines += ["", f"## Log-prob distance in ULP of {unit}", ""]
        lines += table(["ULP", "tokens", ""], bars(report.histogram(unit)), ["---:", "---:", ":---"])
    differing = [found for found in report.verdicts if found.verdict != "equal"]
    if differing:
        names = ["rollout", "verdict", "first token", "first log-prob", "max ULP"]
        rows = map(rollout_line, differing[:most])
        lines += ["", "## Rollouts", "", *table(names, rows, ["---:", "---", "---", "---", "---:"])]
        if len(differing) > most:
            lines += ["", f"and {len(differing) - most} more"]
    return "\n".join(lines) + "\n"


def rollout_line(found: CrossVerdict) -> list[str]:
    """A rollout in words: index, verdict, first differing token and log-prob, greatest distance."""
    verdict = found.verdict if found.reason is None else f"{found.verdict}: {found.reason}"
    places = [place.path if place else "-" for place in (found.first_token, found.first_log_prob)]
    return [str(found.index), verdict, *places, "-" if found.max_ulp is None else str(found.max_ulp)]


def svg(report: CrossReport) -> str:
    """The histograms as an SVG picture: a bar per bin, its count beside it."""
    return draw(
        [
            Chart(
                title=f"log-prob distance, ULP of {unit}: tokens",
                bars=[(one.label, one.n) for one in report.histogram(unit)],
            )
            for unit in sorted(report.ulps)
        ]
    )
