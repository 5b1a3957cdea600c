"""What a batch needs of an engine beside the model: a LoRA adapter, routed experts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.columns import blake2b_256
from rollout.config import BatchConfig
from rollout.engine.client import EngineClient
from rollout.engine.recipes import find_recipe
from rollout.errors import BadConfig, EngineError
from rollout.lake.datafile import file_digest

KEEPS_EXPERTS = "--enable-return-routed-experts"
"""Without it SGLang gives no routed experts."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""A PEFT adapter's files, as far as they decide what it computes."""


def check_recipe(config: BatchConfig) -> None:
    """Check that the batch's recipe starts an engine that gives what the batch wants.

    Raises:
        BadConfig: it gives no routed experts; there is no such recipe.
    """
    if config.routed_experts and KEEPS_EXPERTS not in find_recipe(str(config.engine_recipe)).flags:
        raise BadConfig(f"routed_experts: the recipe {config.engine_recipe} has no {KEEPS_EXPERTS}")


async def check_served(client: EngineClient, config: BatchConfig) -> list[bytes]:
    """What names the batch's adapter in the model's digest; nothing without one.

    An engine (or router) that does not tell what it serves is believed: it refuses requests that it cannot do.

    Raises:
        BadConfig: the engine has no adapter of this name, or gives no routed experts where they are wanted.
    """
    if config.routed_experts:
        with suppress(EngineError):
            if (await client.facts("/server_info")).get("enable_return_routed_experts") is False:
                raise BadConfig(f"routed_experts: start the engine with {KEEPS_EXPERTS}")
    if config.lora is None:
        return []
    adapters: dict[str, Any] = {}
    with suppress(EngineError):
        models = (await client.facts("/v1/models")).get("data") or []
        adapters = {model["id"]: model.get("root") for model in models if model.get("parent") is not None}
        if config.lora not in adapters:
            known = ", ".join(sorted(adapters)) or "none (start it with --enable-lora --lora-paths NAME=PATH)"
            raise BadConfig(f"lora {config.lora!r}: the engine has no such adapter, but {known}")
    return [config.lora.encode(), _identity(str(adapters.get(config.lora)))]


def _identity(root: str) -> bytes:
    """Where the engine has an adapter from, and its files' digests if that is a folder of this machine."""
    parts = [root.encode()]
    for name in ADAPTER_FILES:
        path = Path(root) / name
        if path.is_file():
            with path.open("rb") as file:
                parts += [name.encode(), file_digest(file).encode()]
    return blake2b_256(*parts)
