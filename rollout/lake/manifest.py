"""shards/<shard>.json: the one file that makes a shard staged."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from rollout.lake.schema import TABLE_NAMES, TableName
from rollout.lake.store import check_key


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedFile:
    """One data file; `path` is relative to the batch's folder, `digest` blake2b-256 in hex."""

    table: TableName
    path: str
    rows: int
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A staged shard: who wrote it, its files and counts.

    `writer` is the uuid of the process that won; `folder` is where the manifest was read from and is not stored.
    """

    batch_id: str
    shard: int
    config_hash: str
    writer: str
    created_at: datetime
    files: tuple[StagedFile, ...]
    counts: dict[str, Any]
    folder: str = field(default="", compare=False)

    def files_of(self, table: TableName) -> list[StagedFile]:
        return [file for file in self.files if file.table == table]

    def key(self, file: StagedFile) -> str:
        """The data file's key in the lake."""
        return f"{self.folder}/{file.path}"

    def to_bytes(self) -> bytes:
        data = asdict(self)
        del data["folder"]
        data["created_at"] = self.created_at.isoformat()
        return json.dumps(data, ensure_ascii=False, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, folder: str) -> Manifest:
        """The manifest that `to_bytes` gave.

        Raises:
            ValueError, TypeError, KeyError: not such a manifest, or a file outside its batch's folder.
        """
        values = json.loads(data)
        values["created_at"] = datetime.fromisoformat(values["created_at"])
        files = tuple(StagedFile(**file) for file in values.pop("files"))
        for file in files:
            check_key(file.path)
            if file.table not in TABLE_NAMES:
                raise ValueError(f"{file.table!r} is no table")
        return cls(**values, files=files, folder=folder)
