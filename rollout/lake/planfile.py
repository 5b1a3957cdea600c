"""plan.json: what one batch will do, fixed before its first rollout and never changed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import date, datetime
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """One shard: whole groups, and so a run of indexes."""

    shard: int
    first_group: int
    n_groups: int
    first_index: int
    n_rollouts: int

    @property
    def indexes(self) -> range:
        return range(self.first_index, self.first_index + self.n_rollouts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A batch as planned. `config` is BatchConfig as JSON; `agents` are those that its rows name or default to."""

    batch_id: str
    config: dict[str, Any]
    config_hash: str
    prompts_digest: str
    model_digest: str
    package_version: str
    created_at: datetime
    run_date: date
    slot: str | None
    derived_from: str | None
    n_prompts: int
    n_refused: int
    n_rollouts: int
    agents: tuple[str, ...]
    shards: tuple[ShardPlan, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json."""
        data = asdict(self)
        data["created_at"] = self.created_at.isoformat()
        data["run_date"] = self.run_date.isoformat()
        data["agents"] = list(self.agents)
        data["shards"] = [asdict(shard) for shard in self.shards]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The plan that `to_json` gave.

        Raises:
            ValueError, TypeError, KeyError: not such a plan.
        """
        values = dict(data)
        values["created_at"] = datetime.fromisoformat(data["created_at"])
        values["run_date"] = date.fromisoformat(data["run_date"])
        values["agents"] = tuple(data["agents"])
        values["shards"] = tuple(ShardPlan(**shard) for shard in data["shards"])
        return cls(**values)

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json(), ensure_ascii=False, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """The plan that `to_bytes` gave; errors as `from_json`."""
        return cls.from_json(json.loads(data))
