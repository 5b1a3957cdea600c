"""What a host's supervisor is asked to serve; users of one supervisor ask for the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollout.engine.environment import host_gpus, sglang_python, share_gpus
from rollout.engine.launch import READY_S
from rollout.engine.recipes import Recipe
from rollout.engine.watch import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJob:
    """A recipe, a checkpoint directory, an interpreter, and the GPUs of each engine (none: a CPU)."""

    recipe: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    model: str
    python: str
    gpus: tuple[tuple[str, ...], ...]
    deadline_s: float = READY_S
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, recipe: Recipe, model: Path) -> EngineJob:
        """The job of a recipe on this host.

        Raises:
            NoSGLang, BadConfig: the host has not what the recipe needs.
        """
        return cls(
            recipe=recipe.name,
            flags=recipe.flags,
            environment=dict(recipe.environment),
            model=str(model.absolute()),
            python=str(sglang_python()),
            gpus=tuple(tuple(one) for one in share_gpus(recipe, host_gpus())),
        )

    @property
    def flags_hash(self) -> str:
        return self.to_recipe().flags_hash

    @property
    def key(self) -> str:
        """What must be the same for two users of one supervisor."""
        what = [self.flags, sorted(self.environment.items()), self.model, self.python, self.gpus]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def to_recipe(self) -> Recipe:
        gpus = len(self.gpus[0]) if self.gpus else 0
        return Recipe(name=self.recipe, flags=self.flags, gpus=gpus, environment=self.environment)

    def describe(self) -> str:
        return f"model {self.model} with recipe {self.recipe}, flags {self.flags_hash}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineJob:
        values: dict[str, Any] = json.loads(text)
        values["flags"], values["limits"] = tuple(values["flags"]), Limits(**values["limits"])
        values["gpus"] = tuple(tuple(one) for one in values["gpus"])
        return cls(**values)
