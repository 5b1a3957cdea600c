"""Counters of a session server in Prometheus' text format. They count; they decide nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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
    "engine_failures_total": "Generations that the engine failed or refused.",
    "bridge_refusals_total": "Turns for which the renderer's bridge could not be used, by reason.",
    "lax_matches_total": "Turns that the strict matcher would have put elsewhere.",
    "unreadable_tool_calls_total": "Tool calls whose text stayed in content.",
    "unknown_tool_results_total": "Runs of tool results with an id that no call has.",
    "control_strings_total": "Control strings in clients' texts that became control ids.",
    "ignored_fields_total": "Fields of chat bodies that were not read.",
    "sessions_live": "Sessions held.",
    "generations_running": "Generations running.",
}


class Metrics:
    """Counts by name and, where it has one, label value."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, amount: int = 1, *, label: str = "") -> None:
        """Add to a counter of HELP; `label` is `key="value"`."""
        if amount:
            self._counts[name, label] += amount

    def text(self, gauges: Mapping[str, int]) -> str:
        """The exposition text: all counters, then `gauges`."""
        lines: list[str] = []
        for name, about in HELP.items():
            kind = "gauge" if name in gauges else "counter"
            lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
            if name in gauges:
                lines.append(f"{PREFIX}{name} {gauges[name]}")
                continue
            values = {label: count for (known, label), count in self._counts.items() if known == name}
            for label, count in sorted(values.items()) or [("", 0)]:
                lines.append(f"{PREFIX}{name}{{{label}}} {count}" if label else f"{PREFIX}{name} {count}")
        return "\n".join(lines) + "\n"
