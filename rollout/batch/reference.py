"""The reference case as two batches, v1 and v2: their prompts and options, and the proof that their bits are equal."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.agents.reference_case import FIRST, INPUTS, SECOND, reference_inputs
from rollout.lake.reading import scan_samples
from rollout.parity.projections import PARITY, diff_projected
from rollout.parity.rows import rows_of

VERSIONS = ("v1", "v2")
"""In this order."""
OPTIONS: dict[str, Any] = {
    "n_samples_per_prompt": 1,
    "temperature": 0.0,
    "seed": 20260803,
    "max_new_tokens": 128,
    "reward": None,
    "parity_min_equal": 1.0,
}
"""What both batches share; thinking is off by default."""


def write_reference_prompts(folder: Path, inputs: int = INPUTS) -> Path:
    """The case's first `inputs` prompt rows as a file, made anew with the same bytes each time."""
    file = folder / f"reference-case-{inputs}.jsonl"
    rows = [{**row, "agent": "reference_case"} for row in reference_inputs()[:inputs]]
    folder.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.{os.getpid()}")  # another run may be reading it
    written.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    written.replace(file)
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class InputProof:
    """One input on both versions: `differs` says in one line why it is no proof, and is empty where it is one."""

    index: int
    differs: str


def prove_inputs(lake: str | Path, batch_ids: Sequence[str], inputs: int = INPUTS) -> list[InputProof]:
    """Compare both batches' rows input by input, in every column of the projection `parity`."""
    one, other = (
        {row["index"]: row for row in rows_of(scan_samples(lake, batch_id).collect().to_arrow())}
        for batch_id in batch_ids
    )
    return [InputProof(index=index, differs=_difference(one.get(index), other.get(index))) for index in range(inputs)]


def _difference(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if one is None or other is None:
        return "it is not there on both"
    if paths := diff_projected(one, other, PARITY):
        return "; ".join(paths[:3])
    # Without its tools called, the case would show nothing.
    played = [FIRST, SECOND] == other["metadata"].get("looked_up")
    return "" if played else "the model called other tools than the case is about"
