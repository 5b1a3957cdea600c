"""The tapes of a batch, wherever they are, a few rollouts at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout.batch.view import BatchView
from rollout.errors import BadInput
from rollout.lake.reading import scan_trajectories
from rollout.lake.staging import read_staged
from rollout.parity.validate import read_tape
from rollout.session.tape import Tape

CHUNK = 64
"""Rollouts of the published table that are read at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRollout:
    """One rollout's tape; null where it cannot be read, `problem` says why."""

    index: int
    rollout_key: int
    tape: Tape | None
    problem: str = ""


def rollout_keys(view: BatchView) -> dict[int, int]:
    """rollout_key by index of every rollout that the lake has.

    Raises:
        BadInput: it has none.
    """
    frame = view.samples(["index", "rollout_key"])
    if not frame.width or not frame.height:
        raise BadInput(f"batch {view.batch_id} has no rows yet: `rollout run --batch-id {view.batch_id}` goes on")
    rows = frame.unique("index").sort("index").rows()
    return {int(index): int(key) for index, key in rows}


def spread(indexes: Sequence[int], most: int | None) -> list[int]:
    """At most `most` of the indexes, spread evenly over all of them; the same ones each time."""
    if most is None or most >= len(indexes):
        return list(indexes)
    return [indexes[k * len(indexes) // most] for k in range(most)]


def read_tapes(view: BatchView, keys: dict[int, int], indexes: Sequence[int]) -> Iterator[list[RecordedRollout]]:
    """The tapes of these rollouts by index, in lists of those that are read at once."""
    if view.status in ("published", "released"):
        for first in range(0, len(indexes), CHUNK):
            wanted = indexes[first : first + CHUNK]
            low, high = wanted[0], wanted[-1]
            rows = scan_trajectories(view.paths, view.batch_id).filter(
                pl.col("index").is_between(low, high) & pl.col("index").is_in(list(wanted))
            )
            yield _tapes(rows.collect().to_arrow(), keys, wanted)
        return
    for manifest in view.staged.values():
        _, trajectories = read_staged(view.paths, manifest)
        there = set(trajectories.column("index").to_pylist())
        if wanted := [index for index in indexes if index in there]:
            yield _tapes(trajectories, keys, wanted)


def _tapes(table: pa.Table, keys: dict[int, int], wanted: Sequence[int]) -> list[RecordedRollout]:
    found = []
    for index in wanted:
        try:
            tape, _ = read_tape(table.filter(pc.equal(table.column("index"), index)))
            found.append(RecordedRollout(index=index, rollout_key=keys[index], tape=tape))
        except ValueError as error:
            found.append(RecordedRollout(index=index, rollout_key=keys[index], tape=None, problem=str(error)))
    return found
