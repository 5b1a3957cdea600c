"""Tasks that end a batch: publish it, or put it into quarantine. Both are safe to repeat."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from rollout.batch.prepare import Batch
from rollout.lake.manifest import Manifest
from rollout.lake.publishing import Published, publish_batch, quarantine_batch

Manifests = dict[int, Manifest]


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
async def publish(batch: Batch, manifests: Manifests, parity: pa.Table, row: dict[str, Any]) -> Published:
    """Commit the four tables, samples last; that commit is the publication.

    Args:
        manifests: those that were judged, by shard; nothing that was staged meanwhile gets in.
    """
    return await asyncio.to_thread(publish_batch, batch.paths, batch.plan, manifests, parity, row)


@task(name="quarantine", cache_policy=NO_CACHE, persist_result=False)
async def quarantine(batch: Batch, manifests: Manifests, parity: pa.Table, row: dict[str, Any], reason: str) -> None:
    """Hold the batch back: verdicts and its row are committed, its files and a report moved aside."""
    report = {"reason": reason, "differing": _differing(parity)}
    await asyncio.to_thread(quarantine_batch, batch.paths, batch.plan, manifests, parity, row, report)


def _differing(parity: pa.Table) -> list[dict[str, Any]]:
    columns = parity.select(["index", "rollout_key", "check", "verdict", "reason", "paths"])
    return [row for row in columns.to_pylist() if row["verdict"] == "differs"]
