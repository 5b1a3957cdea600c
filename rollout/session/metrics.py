"""Counters of a session server in Prometheus' text format. They count; they decide nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rollout.tito.drift import DRIFT_TYPES

PREFIX = "rollout_session_"

HELP = {
    "sessions_opened_total": "Sessions opened.",
    "sessions_deleted_total": "Sessions deleted.",
    "sessions_expired_total": "Sessions that nobody used for too long.",
    "sessions_restored_total": "Sessions taken from the journal of an earlier process.",
    "sessions_not_restored_total": "Sessions in the journal that could not be taken from it.",
    "turns_total": "Generations committed.",
    "sampled_tokens_total": "Token ids sampled in committed generations.",
    "refused_total": "Requests refused, by HTTP status.",
    "unrecorded_total": "v1 answers that another one overtook.",
    "aborted_total": "Generations aborted because the client left or the session was deleted.",
    "coalesced_total": "Repeats of a request that got the answer of its first.",
    "journal_bytes_total": "Bytes appended to the journal.",
    "journal_failures_total": "What the journal did not take.",
    "engine_failures_total": "Generations that the engine failed.",
    "engine_refusals_total": "Generations that the engine refused with a 4xx, which is no failure of its own.",
    "bridge_refusals_total": "Turns for which the renderer's bridge could not be used, by reason.",
    "shadow_decisions_total": "Accepted requests, by what the shadow matcher would have decided.",
    "unreadable_tool_calls_total": "Tool calls whose text stayed in content.",
    "unknown_tool_results_total": "Runs of tool results with an id that no call has.",
    "control_strings_total": "Control strings in clients' texts that became control ids.",
    "ignored_fields_total": "Fields of chat bodies that were not read.",
    "tito_compared_total": "Sessions compared with their template when their samples were taken.",
    "tito_session_mismatch_total": "Those of them that differ, by type of difference; any counts each once.",
    "tito_session_mismatch_rate": "tito_session_mismatch_total over tito_compared_total.",
    "sessions_live": "Sessions held in memory.",
    "sessions_restoring": "Sessions that are still in the journal of an earlier process only.",
    "generations_running": "Generations running, those held among them.",
    "generations_held": "Generations that wait here until the engine's queue has room.",
}


class Metrics:
    """Counts by name and, where it has one, label value."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, amount: int = 1, *, label: str = "") -> None:
        """Add to a counter of HELP; `label` is `key="value"`."""
        if amount:
            self._counts[name, label] += amount

    def compared(self, version: str, types: Iterable[str]) -> None:
        """Count a session that was compared with its template, and the types of difference found."""
        found = set(types)
        self.add("tito_compared_total", label=f'version="{version}"')
        for kind in ("any", *DRIFT_TYPES):
            hit = bool(found) if kind == "any" else kind in found
            self.add("tito_session_mismatch_total", int(hit), label=f'version="{version}",type="{kind}"')

    def _values(self, name: str) -> list[tuple[str, float]]:
        if name != "tito_session_mismatch_rate":
            return sorted((label, count) for (known, label), count in self._counts.items() if known == name)
        return [
            (
                f'{version},type="{kind}"',
                self._counts["tito_session_mismatch_total", f'{version},type="{kind}"'] / total,
            )
            for version, total in self._values("tito_compared_total")
            for kind in ("any", *DRIFT_TYPES)
        ]

    def text(self, gauges: Mapping[str, int]) -> str:
        """The exposition text: all counters, then `gauges`."""
        lines: list[str] = []
        for name, about in HELP.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
            if name in gauges:
                lines.append(f"{PREFIX}{name} {gauges[name]}")
                continue
            for label, count in self._values(name) or [("", 0)]:
                lines.append(f"{PREFIX}{name}{{{label}}} {count}" if label else f"{PREFIX}{name} {count}")
        return "\n".join(lines) + "\n"
