"""How a batch ended, as Prefect's UI shows it: the texts, tables and pictures of its artifacts."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa

from rollout.batch.costs import Costs, value_text
from rollout.batch.figures import distributions, group_rows
from rollout.batch.prepare import Batch
from rollout.batch.report import summary_rows
from rollout.batch.summary import Summary
from rollout.batch.verdicts import differing_rows, first_difference, verdict_chart, verdict_text
from rollout.markdown import table
from rollout.plot import data_url, svg


class Ending:
    """What is known of a batch whose shards are all checked. No dataclass: Prefect would walk through all of it.

    `facts` is a small row per sample (rollout.batch.check.join_facts).
    """

    def __init__(self, batch: Batch, summary: Summary, costs: Costs, parity: pa.Table, facts: pl.DataFrame) -> None:
        self.batch_id, self._lake = batch.plan.batch_id, batch.paths.uri
        self.summary, self._costs, self._parity, self._facts = summary, costs, parity, facts

    def summary_rows(self) -> list[tuple[str, str]]:
        """What came out, and of the costs those that are known."""
        known = [(name, text) for name, value in self._costs.to_json().items() if (text := value_text(value))]
        return [(what.strip(), value) for what, value in summary_rows(self.summary)] + known

    def text(self, how: str) -> str:
        """Markdown: `how` in one line; what differs, where something does; and the summary."""
        lines = [f"# {self.batch_id}", "", how, ""]
        if differing := differing_rows(self._parity):
            lines += ["## What differs", "", *first_difference(differing), ""]
            lines += [f"`rollout parity {self.batch_id} --lake {self._lake}` prints every path.", ""]
        return "\n".join([*lines, *table(["", ""], self.summary_rows())]) + "\n"

    def parity_text(self) -> str:
        return verdict_text(self.batch_id, self._lake, self.summary, self._parity)

    def parity_plot(self) -> str:
        """A picture as a URL."""
        return data_url(svg([verdict_chart(self.summary)]))

    def distribution_plot(self) -> str:
        """A picture as a URL."""
        return data_url(svg(distributions(self._facts)))

    def groups(self) -> tuple[list[dict[str, Any]], str]:
        """Rows of the table of groups, and what it says of them."""
        rows, more = group_rows(self._facts)
        left = f"; and {more} more" if more else ""
        return rows, f"{self.batch_id}: groups, lowest pass rate first{left}"

    def lake_text(self, version: int | None) -> str:
        """Markdown: where the rows are, and how they are read. `version`: of the samples table; null: held back."""
        if version is None:
            facts = [("lake", self._lake), ("held back in", f"{self._lake}/quarantine/{self.batch_id}")]
            return "\n".join([f"# {self.batch_id} is not published", "", *table(["", ""], facts)]) + "\n"
        facts = [("lake", self._lake), ("table", f"{self._lake}/tables/samples"), ("version", str(version))]
        code = (
            f'from rollout.lake import scan_samples\n\nsamples = scan_samples("{self._lake}", batch="{self.batch_id}")'
        )
        head = [f"# Where the rows of {self.batch_id} are", "", *table(["", ""], facts)]
        return "\n".join([*head, "", "```python", code, "```"]) + "\n"
