"""A batch's own requests once more, straight at the engine: its tapes without session, agent, flow and lake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rollout.engine.client import EngineClient
from rollout.lake.paths import LakePaths
from rollout.lake.staging import read_staged, staged_shards
from rollout.session.tape import Exchange, Tape, table_to_tape


@dataclass(kw_only=True, slots=True)
class Replayed:
    """What the engine did: sampled tokens, turns, those whose ids were the recorded ones, and wall seconds."""

    tokens: int = 0
    turns: int = 0
    same: int = 0
    seconds: float = 0.0


def read_tapes(lake: str, batch: str) -> list[Tape]:
    """The tapes of a batch's staged shards, by the rollout's index."""
    paths = LakePaths(lake)
    table = pa.concat_tables(read_staged(paths, one)[1] for one in staged_shards(paths, batch).values())
    rows = table.to_pydict()
    places: dict[int, list[int]] = {}
    for place, index in enumerate(rows["index"]):
        places.setdefault(index, []).append(place)
    return [table_to_tape(table.take(places[index]))[0] for index in sorted(places)]


async def replay_tapes(tapes: Sequence[Tape], url: str, *, concurrency: int, stop_ids: Sequence[int]) -> Replayed:
    """Send the tapes' prompts with their recorded parameters: so many rollouts at once, each turn behind its last.

    `stop_ids` end a turn of the model's family; a session sends them with every request.
    """
    client, done, waiting = EngineClient(url), Replayed(), iter(tapes)

    async def work() -> None:
        for tape in waiting:
            for exchange, body in zip(tape.exchanges, engine_requests(tape, stop_ids), strict=True):
                reply = await client.generate(body, rid=f"again-{exchange.rid}", session_id=tape.session_id)
                sampled = reply["meta_info"]["output_token_logprobs"]
                done.tokens += len(sampled)
                done.turns += 1
                done.same += [one[1] for one in sampled] == exchange.output_ids_O.tolist()

    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    finally:
        await client.close()
    done.seconds = time.monotonic() - began
    return done


def engine_requests(tape: Tape, stop_ids: Sequence[int]) -> list[dict[str, Any]]:
    """The body of POST /generate for each exchange, as the session sent it."""
    prompts: list[list[int]] = []
    for exchange in tape.exchanges:
        before = [] if exchange.parent is None else _behind(tape.exchanges[exchange.parent], prompts)
        prompts.append(before + exchange.appended_ids_P.tolist())
    return [_body(exchange, ids, stop_ids) for exchange, ids in zip(tape.exchanges, prompts, strict=True)]


def _behind(parent: Exchange, prompts: list[list[int]]) -> list[int]:
    return prompts[parent.seq] + parent.output_ids_O.tolist()


def _body(exchange: Exchange, input_ids: list[int], stop_ids: Sequence[int]) -> dict[str, Any]:
    parameters = {**exchange.settings["sampling"], "sampling_seed": exchange.sampling_seed}
    parameters["stop_token_ids"] = [*parameters.get("stop_token_ids", []), *stop_ids]
    return {"input_ids": input_ids, "sampling_params": parameters, "return_logprob": True}
