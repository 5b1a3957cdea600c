"""A batch's verdicts in words: counts, and from there down to one difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout.batch.figures import MOST_ROWS
from rollout.batch.summary import Summary
from rollout.markdown import table
from rollout.plot import Chart


def verdict_counts(summary: Summary) -> Iterator[tuple[str, str, int]]:
    """(check, verdict with its reason, rollouts), replayed before live."""
    checks = (("replay", summary.verdicts, summary.reasons), ("live", summary.live, summary.live_reasons))
    for check, verdicts, reasons in checks:
        for verdict, n in verdicts.items():
            kinds = reasons.get(verdict, {})
            yield from ((check, f"{verdict}: {kind}", count) for kind, count in kinds.items())
            if n > sum(kinds.values()):
                yield check, verdict, n - sum(kinds.values())


def verdict_chart(summary: Summary) -> Chart:
    bars = [(name if check == "replay" else f"live {name}", n) for check, name, n in verdict_counts(summary)]
    return Chart(title="verdicts: rollouts", bars=bars)


def differing_rows(parity: pa.Table) -> list[dict[str, Any]]:
    """The rows of the parity table that say `differs`, in their order."""
    rows: list[dict[str, Any]] = parity.filter(pc.equal(parity.column("verdict"), "differs")).to_pylist()
    return rows


def verdict_text(batch_id: str, lake: str, summary: Summary, parity: pa.Table) -> str:
    """Markdown: the counts; where something differs, its first difference and a list of all rollouts that do."""
    counts = [(check, name, str(n)) for check, name, n in verdict_counts(summary)]
    lines = [f"# Parity of {batch_id}", "", *table(["check", "verdict", "rollouts"], counts, ["---", "---", "---:"])]
    if differing := differing_rows(parity):
        lines += ["", "## One difference", "", *first_difference(differing)]
        lines += ["", f"## Rollouts that differ: {len(differing)}", ""]
        rows = [[str(row["index"]), row["check"], row["reason"] or "", _first_path(row)] for row in differing]
        lines += table(["rollout", "check", "reason", "first path"], rows[:MOST_ROWS], ["---:"])
        if len(differing) > MOST_ROWS:
            lines += ["", f"and {len(differing) - MOST_ROWS} more"]
        lines += ["", f"`rollout parity {batch_id} --lake {lake}` prints every path."]
    return "\n".join(lines) + "\n"


def first_difference(differing: list[dict[str, Any]]) -> list[str]:
    """One difference as a table: the rollout, the path to the value, and the value on either side, floats with bits."""
    row = next((row for row in differing if row["paths"]), differing[0])
    facts = [("rollout", str(row["index"])), ("rollout_key", str(row["rollout_key"])), ("check", row["check"])]
    facts += [("reason", row["reason"])] if row["reason"] else []
    if row["paths"]:
        path, _, values = row["paths"][0].partition(": ")
        staged, _, other = values.partition(" != ")
        again = "replayed" if row["check"] == "replay" else "run again"
        facts += [("path", path), ("staged", staged), (again, other)]
        facts += [("further paths", str(len(row["paths"]) - 1))] if len(row["paths"]) > 1 else []
    return table(["", ""], facts)


def _first_path(row: dict[str, Any]) -> str:
    return row["paths"][0] if row["paths"] else ""
