"""A batch's checkpoint on this machine, and the digest of the model that stands in its plan."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.batch.served import check_recipe, check_served
from rollout.columns import blake2b_256
from rollout.config import BatchConfig
from rollout.engine.agreement import LOADED, read_facts, require_same
from rollout.engine.checkpoint import read_checkpoint
from rollout.engine.client import EngineClient
from rollout.engine.tiny import CHECKPOINT
from rollout.errors import BadCheckpoint, BadConfig, EngineError
from rollout.home import state_home
from rollout.lake.datafile import file_digest
from rollout.lake.paths import S3_SCHEME

MODELS = "models"
"""Folder of fetched checkpoints, below the command's state folder."""


async def fetched_directory(config: BatchConfig, say: Callable[[str], None] | None = None) -> Path:
    """The batch's checkpoint directory; the shipped one where none is given.

    One on s3:// is fetched in a thread if it is not here as it is there now. An external engine has the
    weights itself: then the directory has config and tokenizer alone. A caller that is cancelled ends the fetch.

    Args:
        say: told how far a long fetch is; from another thread.

    Raises:
        BadConfig, BadCheckpoint: it cannot be fetched.
    """
    if config.model is None or not config.model.startswith(S3_SCHEME):
        return _local(config.model)
    from rollout.batch.model_source import fetch_model  # fsspec takes a while to import

    left, weights = threading.Event(), config.engine != "external"
    try:
        return await asyncio.to_thread(
            fetch_model, config.model, state_home() / MODELS, weights=weights, say=say, left=left
        )
    finally:
        left.set()


def tokenizer_directory(model: str | None) -> Path:
    """A directory with the tokenizer of a batch's `model`, for those who need no weights.

    Raises:
        BadConfig, BadCheckpoint: it cannot be fetched.
    """
    if model is None or not model.startswith(S3_SCHEME):
        return _local(model)
    from rollout.batch.model_source import fetch_model

    return fetch_model(model, state_home() / MODELS, weights=False)


def _local(model: str | None) -> Path:
    return CHECKPOINT if model is None else Path(model).expanduser().absolute()


async def model_digest(config: BatchConfig, directory: Path) -> str:
    """Digest of the model's weights in hex: of the checkpoint's files, or of an external engine's own statement.

    Weights that are yet to be loaded (update_weights) count as the engine will state them, so a batch that goes on
    has the same digest before and after. A LoRA adapter's weights are in it too.

    Args:
        directory: what fetched_directory gave for `config`.

    Raises:
        BadCheckpoint: the directory cannot be loaded.
        BadConfig: an external engine does not answer, or not serve what the batch wants of it.
        EngineMismatch: two of them do not serve the same.
    """
    if config.engine == "embedded":
        return await asyncio.to_thread(checkpoint_digest, directory)
    if config.engine == "sglang":
        check_recipe(config)
        return await asyncio.to_thread(directory_digest, directory)
    served, adapter = await _served(config)
    path, version = config.update_weights, config.weight_version
    if path is None:
        path, version = served.get("model_path"), served.get("weight_version")
    return blake2b_256(str(path).encode(), str(version).encode(), *adapter).hex()


async def _served(config: BatchConfig) -> tuple[dict[str, Any], list[bytes]]:
    """What the external engines state, all of them the same, and what names the batch's adapter.

    Raises:
        BadConfig, EngineMismatch: as model_digest.
    """

    async def ask(url: str) -> tuple[dict[str, Any], list[bytes]]:
        async with EngineClient(url, timeout_s=10.0) as client:
            try:
                return await read_facts(client), await check_served(client, config)
            except EngineError as error:
                raise BadConfig(f"engine_url {url}: {error}") from error

    urls = config.engine_urls
    told = await asyncio.gather(*(ask(url) for url in urls))
    facts = {
        url: {**stated, "lora": [part.hex() for part in adapter]}
        for url, (stated, adapter) in zip(urls, told, strict=True)
    }
    return require_same(facts, but=LOADED if config.update_weights is not None else ()), told[0][1]


def checkpoint_digest(directory: Path) -> str:
    """blake2b-256 in hex over the names and bytes of a checkpoint's config, tokenizer and weights.

    Raises:
        BadCheckpoint: the directory cannot be loaded.
    """
    checkpoint = read_checkpoint(directory)
    return _digest({*checkpoint.files.values(), *_named(directory)})


def directory_digest(directory: Path) -> str:
    """The same over a checkpoint of an architecture that only SGLang loads; equal where both can be had.

    Raises:
        BadCheckpoint: it lacks config, tokenizer or weights.
    """
    weights, named = set(directory.glob("*.safetensors")), _named(directory)
    missing = {"config.json", "tokenizer.json"} - {path.name for path in named}
    if missing or not weights:
        raise BadCheckpoint(f"{directory}: no {' and no '.join(sorted(missing)) or '*.safetensors'} there")
    return _digest({*weights, *named})


def _named(directory: Path) -> set[Path]:
    named = {directory / name for name in ("config.json", "generation_config.json", "tokenizer.json")}
    return {path for path in named if path.is_file()}


def _digest(files: set[Path]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted(files):
        with path.open("rb") as file:
            part = file_digest(file)
        digest.update(f"{path.name}\x00{part}\x00".encode())
    return digest.hexdigest()
