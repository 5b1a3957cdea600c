"""Shards as tasks of a Ray cluster, one Prefect task run each."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
from prefect import get_run_logger
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray.exceptions import RayError

from rollout.batch.apart import reference_to
from rollout.batch.prepare import Batch
from rollout.batch.progress import BatchProgress
from rollout.config import BatchConfig
from rollout.engine.updating import update_engines
from rollout.errors import BadConfig, ShardLost
from rollout.parts import ALLOWED_MODULES
from rollout.ray_options import module_paths, parse_resources, remote_arguments
from tasks.rollout import roll_out_apart

LOSSES = 3
"""How often a shard is run again elsewhere because its process or its node was lost."""


class RayShards:
    """Rolls out shards of one batch on a cluster."""

    def __init__(self, runner: RayTaskRunner[Any], batch: Batch, progress: BatchProgress) -> None:
        self._runner, self._progress, self._reference = runner, progress, reference_to(batch)
        self._options = {**remote_arguments(parse_resources(batch.config.ray_resources)), "max_retries": LOSSES}

    async def roll_out(self, shard: int) -> None:
        """Have the shard staged, by whichever node is free first.

        Raises:
            ShardLost: Ray gives it up.
            RolloutLakeError: what its task raised.
        """
        with remote_options(**self._options):
            future = self._runner.submit(roll_out_apart, {"batch": self._reference, "shard": shard})
        try:
            state = await future.wrapped_future
        except RayError as error:
            raise ShardLost(f"Ray gives up shard {shard}: {_ends_of(error)}") from error
        self._progress.shard_staged(await state.aresult())


def _ends_of(error: RayError) -> str:
    """The first and the last line: Ray's own, and that of a traceback which it puts between."""
    lines = str(error).strip().splitlines()
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))


@asynccontextmanager
async def ray_shards(batch: Batch, progress: BatchProgress) -> AsyncIterator[RayShards]:
    """A connection to the batch's cluster; what still runs there for it is ended with the block.

    Raises:
        BadConfig: no cluster answers, it has another version, or no node has the resources.
    """
    config = batch.config
    if config.update_weights is not None:  # here and once; the nodes then find the engines updated
        await update_engines(config.engine_urls, config.update_weights, str(config.weight_version))
    await asyncio.to_thread(_connect, config)  # in the main thread Ray would take SIGTERM from the flow
    try:
        _check_nodes(parse_resources(config.ray_resources))
        with RayTaskRunner() as runner:
            yield RayShards(runner, batch, progress)
    finally:
        await asyncio.to_thread(ray.shutdown)


def _connect(config: BatchConfig) -> None:
    address = config.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    allowed = {name: os.environ[name] for name in (ALLOWED_MODULES,) if name in os.environ}
    environment: dict[str, Any] = {"env_vars": allowed}
    if config.modules:
        environment["py_modules"] = [str(path) for path in module_paths(config.modules)]
    try:
        _check_answers(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except (OSError, RuntimeError, ValueError) as error:
        raise BadConfig(
            f"ray_address {address}: {' '.join(str(error).split())}; start a cluster with `ray start --head`, of the "
            "same Ray and Python as here"
        ) from error


def _check_answers(address: str) -> None:
    """Raise OSError where nothing listens: Ray itself would go on trying for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10.0).close()


def _check_nodes(wanted: dict[str, float]) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes):
        asked = ",".join(f"{name}={amount:g}" for name, amount in wanted.items())
        raise BadConfig(f"ray_resources {asked}: none of the cluster's {len(nodes)} nodes has that")
    get_run_logger().info("Ray cluster of %d nodes", len(nodes))
