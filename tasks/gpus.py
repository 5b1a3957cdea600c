"""A host's GPUs as batches share them: slots of a concurrency limit of the Prefect server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prefect import get_client
from prefect.concurrency.asyncio import concurrency
from prefect.exceptions import ObjectNotFound

from rollout.errors import BadConfig

GPU_LIMIT = "ROLLOUT_GPU_LIMIT"
"""Environment variable of a worker: the limit that counts its host's GPUs, as gpu:host7. Unset: nothing is counted."""

LEASE_S = 900.0
"""Seconds until the server takes back the slots of a batch that is gone without a word.

A thread renews the lease when three quarters of it have gone, whatever the batch does meanwhile. A batch
that cannot renew goes on, and its slots are given away at the lease's end: so it is longer than the
longest shard (ten seconds to a minute; ten minutes if each rollout runs into its deadline twice).
"""


@asynccontextmanager
async def gpus_held(n: int, waiting: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold `n` of this host's GPUs for as long as the block lasts, after as long a wait as it takes.

    Args:
        waiting: told what is asked for, once.

    Raises:
        BadConfig: there is no such limit at the server, or it can never have room for `n`.
    """
    name = os.environ.get(GPU_LIMIT)
    if not name or n == 0:
        yield
        return
    await _require_limit(name, n)
    waiting(f"waiting for {n} of {name}")
    async with concurrency(name, occupy=n, strict=True, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False):
        yield


async def _require_limit(name: str, n: int) -> None:
    async with get_client() as client:
        try:
            limit = await client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound as error:
            raise BadConfig(
                f"{GPU_LIMIT} {name}: the Prefect server has no such limit, `prefect gcl create {name} --limit N` "
                "makes it, N being the GPUs of this host"
            ) from error
    if limit.limit < n:
        raise BadConfig(
            f"{GPU_LIMIT} {name}: its limit is {limit.limit}, the batch's engines take {n}: "
            f"`prefect gcl update {name} --limit {n}` if the host has them, else another recipe or engine_gpus"
        )
