"""All rows of a batch's prompts, checked once and read again when asked for, so that a million cost little memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import orjson

from rollout.batch.content import Content
from rollout.batch.rowstore import RowStore
from rollout.columns import dump_json
from rollout.row_sampling import Bounds

DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One prompt. `line` counts from 1 (tables: rows); `digest` is blake2b-128 (hex) over the row's exact bytes.

    `refused` is None, or with skip_bad why the row cannot run; its other fields are then empty.
    """

    line: int
    digest: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    agent: str | None = None
    rollout_id: int | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnIds:
    """The rows that have a rollout_id of their own: their positions and ids, int64, shape (n,), in order."""

    positions_N: npt.NDArray[np.int64]
    ids_N: npt.NDArray[np.int64]


class PromptRows(Sequence[PromptRow]):
    """The rows as a sequence: each access makes a new PromptRow, which shares nothing with any other.

    `name` is what the rows were read from, a lake table's with the version that was read; `fingerprint` tells
    whether something else would give the same rows. `content` is what the config hash is over.
    """

    def __init__(
        self,
        *,
        name: str,
        unit: Literal["line", "row"],
        fingerprint: str,
        skip_bad: bool,
        bounds: Bounds | None = None,
    ) -> None:
        self.name, self.unit, self.fingerprint, self.skip_bad, self.bounds = name, unit, fingerprint, skip_bad, bounds
        self.content = Content.of(b"")
        self.n_refused = 0
        self._store = RowStore()
        self._lines = array("q")
        self._digests = bytearray()
        self._refused = bytearray()
        self._own_positions, self._own_ids = array("q"), array("q")
        self._agents: set[str | None] = set()

    def add(self, line: int, digest: bytes, row: dict[str, Any], text: bytes) -> None:
        """Append a row that can run; `text` is its JSON."""
        if row.get("rollout_id") is not None:
            self._own_positions.append(len(self))
            self._own_ids.append(row["rollout_id"])
        self._agents.add(row.get("agent"))
        self._add(line, digest, text, refused=False)

    def add_refused(self, line: int, digest: bytes, why: str) -> None:
        """Append a row that cannot run."""
        self.n_refused += 1
        self._add(line, digest, why.encode(errors="surrogatepass"), refused=True)

    def _add(self, line: int, digest: bytes, data: bytes, *, refused: bool) -> None:
        self._lines.append(line)
        self._digests += digest
        self._refused.append(refused)
        self._store.append(data)

    def close(self, content: Content | None) -> None:
        """No more rows come. Without `content` it is the rows' digests, one after the other."""
        self._store.close()
        self.content = content or Content.of(bytes(self._digests))

    def agents(self, default: str) -> tuple[str, ...]:
        """Names of the agents of the rows that can run, sorted; `default` for those that name none."""
        return tuple(sorted({name or default for name in self._agents}))

    @property
    def own_ids(self) -> OwnIds:
        return OwnIds(positions_N=np.array(self._own_positions, np.int64), ids_N=np.array(self._own_ids, np.int64))

    def line(self, position: int) -> int:
        return self._lines[position]

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, position: int) -> PromptRow: ...

    @overload
    def __getitem__(self, position: slice) -> list[PromptRow]: ...

    def __getitem__(self, position: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(position, slice):
            return [self._row(k) for k in range(*position.indices(len(self)))]
        if not -len(self) <= position < len(self):
            raise IndexError(position)
        return self._row(position % len(self))

    def _row(self, k: int) -> PromptRow:
        line, digest = self._lines[k], self._digests[k * DIGEST_BYTES : (k + 1) * DIGEST_BYTES].hex()
        data = self._store[k]
        if self._refused[k]:
            return PromptRow(line=line, digest=digest, refused=data.decode(errors="surrogatepass"))
        row = orjson.loads(data)
        label = row.get("label")
        return PromptRow(
            line=line,
            digest=digest,
            messages=row["messages"],
            tools=row.get("tools"),
            label=label if label is None or isinstance(label, str) else dump_json(label),
            metadata=row.get("metadata") or {},
            agent=row.get("agent"),
            rollout_id=row.get("rollout_id"),
        )
