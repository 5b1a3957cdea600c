"""A batch's tapes against another engine: reads them, asks it turn by turn, and counts what moved."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import orjson
import pyarrow as pa

from rollout.batch.model import tokenizer_directory
from rollout.batch.repeats import server_info
from rollout.batch.tapes import RecordedRollout, read_tapes, rollout_keys, spread
from rollout.batch.view import BatchView
from rollout.columns import SCHEMA_VERSION
from rollout.config import make_config
from rollout.engine.client import EngineClient
from rollout.engine.generation import Generation, read_generation
from rollout.errors import BadConfig, EngineError, EngineMismatch, EngineRefused
from rollout.lake.schema import rows_to_table
from rollout.parity.cross import CHECK, CrossVerdict, judge_cross, turn_request
from rollout.parity.cross_report import CrossReport
from rollout.parity.replay import prompt_ids
from rollout.session.tape import Tape
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import load_tokenizer

Progress = Callable[[int, int], None]
"""Called with how many rollouts are compared, and of how many."""


async def compare_engines(
    view: BatchView, url: str, *, rollouts: int | None, concurrency: int, progress: Progress | None = None
) -> CrossReport:
    """Ask the engine at `url` every recorded turn of a batch's rollouts, and compare.

    Args:
        rollouts: compare so many at most, spread evenly over the batch; null: all.
        concurrency: turns in flight at the engine. What repeats only alone must be asked alone.

    Raises:
        BadConfig: the engine does not answer.
        EngineMismatch: it serves another vocabulary or architecture.
        BadInput: the batch has no rows yet.
        EngineError: it is gone, or answers nonsense; says how many rollouts were compared.
    """
    assert view.plan is not None
    config = make_config(**{**view.plan.config, "lake": view.paths.uri})
    directory = await asyncio.to_thread(tokenizer_directory, config.model)
    tito = await asyncio.to_thread(lambda: Tito(load_tokenizer(str(directory)), config.renderer))
    keys = await asyncio.to_thread(rollout_keys, view)
    chosen = spread(list(keys), rollouts)
    async with EngineClient(url) as client:
        info = await _model_info(client, url)
        _check_model(url, info, tito, orjson.loads((directory / "config.json").read_bytes()))
        report = CrossReport(
            batch_id=view.batch_id,
            engine_a=await asyncio.to_thread(_recorded_by, view),
            engine_b=_describe(url, info, await server_info(url)),
            n_rollouts=len(keys),
        )
        asking = _Asking(client, tito, concurrency, check_ids=info.get("vocab_size") is None)
        await _compare(asking, read_tapes(view, keys, chosen), report, len(chosen), progress)
    return report


async def _compare(
    asking: _Asking,
    chunks: Iterator[list[RecordedRollout]],
    report: CrossReport,
    n_chosen: int,
    progress: Progress | None,
) -> None:
    async def one(recorded: RecordedRollout) -> CrossVerdict:
        found = await asking.judge(recorded)
        done[0] += 1
        if progress is not None:
            progress(done[0], n_chosen)
        return found

    done = [0]
    try:
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(recorded)) for recorded in chunk]
            for task in tasks:
                report.add(task.result())
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, EngineError):
            raise first from None
        raise EngineError(f"{first}; {done[0]} of {n_chosen} rollouts were compared") from first


class _Asking:
    """Asks one engine the turns of tapes."""

    def __init__(self, client: EngineClient, tito: Tito, concurrency: int, *, check_ids: bool) -> None:
        self._client, self._tito = client, tito
        self._slots, self._checking = asyncio.Semaphore(concurrency), asyncio.Lock()
        self._unchecked = check_ids

    async def judge(self, recorded: RecordedRollout) -> CrossVerdict:
        """The verdict on one rollout; raises EngineError, EngineMismatch."""
        started, tape = time.perf_counter(), recorded.tape
        none = CrossVerdict(index=recorded.index, rollout_key=recorded.rollout_key, verdict="not_comparable")
        if tape is None:
            return replace(none, reason=f"broken: {recorded.problem}")
        if not tape.exchanges:
            return replace(none, reason="no_turns")
        await self._check_ids(tape)
        try:
            answers = [await self._ask(tape, seq) for seq in range(len(tape.exchanges))]
        except EngineRefused as error:
            return replace(none, reason=f"refused: {error}")
        if any(answer.finish == "abort" for answer in answers):
            return replace(none, reason="aborted")
        found = judge_cross(tape, answers, index=recorded.index, rollout_key=recorded.rollout_key)
        found.seconds = time.perf_counter() - started
        return found

    async def _ask(self, tape: Tape, seq: int) -> Generation:
        request = turn_request(tape, seq, stop_token_ids=self._tito.stop_token_ids)
        async with self._slots:
            return await self._generate(request)

    async def _generate(self, request: dict[str, Any]) -> Generation:
        reply = await self._client.generate(request, rid=f"cross-{uuid.uuid4().hex}", session_id=None)
        return read_generation(reply, vocabulary=self._tito.vocabulary, n_prompt=len(request["input_ids"]))

    async def _check_ids(self, tape: Tape) -> None:
        """Before the first ids: does the engine's tokenizer read a prompt's text as ours? An id that it does not
        have would end SGLang, and it does not say how many it has.

        Raises:
            EngineMismatch: it reads another number of ids.
        """
        async with self._checking:
            if not self._unchecked:
                return
            ids = prompt_ids(tape, 0).tolist()
            text = self._tito.decode(ids)
            if self._tito.tokenizer.encode(text) != ids:
                return  # this prompt's text says nothing; another one may
            params = {"max_new_tokens": 1, "temperature": 0.0}
            reply = await self._client.generate(
                {"text": text, "sampling_params": params}, rid=f"cross-{uuid.uuid4().hex}", session_id=None
            )
            counted = (reply.get("meta_info") or {}).get("prompt_tokens")
            if counted != len(ids):
                raise EngineMismatch(
                    f"{self._client.base_url}: its tokenizer makes {counted} ids of a text that the batch's makes "
                    f"{len(ids)} of: it serves another vocabulary"
                )
            self._unchecked = False


async def _model_info(client: EngineClient, url: str) -> dict[str, Any]:
    try:
        return await client.model_info()
    except EngineError as error:
        raise BadConfig(f"--against {url}: {error}") from error


def _check_model(url: str, info: dict[str, Any], tito: Tito, config: dict[str, Any]) -> None:
    """Hold what the engine says of its model against the batch's checkpoint; what it does not say is no difference."""
    told = {"vocab_size": tito.vocabulary, **{name: config.get(name) for name in ("model_type", "architectures")}}
    for name, own in told.items():
        served = info.get(name)
        if served is not None and own is not None and served != own:
            raise EngineMismatch(
                f"{url} serves {info.get('model_path')} with {name} {served}, the batch's checkpoint has {own}"
            )


def _recorded_by(view: BatchView) -> str:
    engine = view.samples(["engine"])["engine"][0] or {}
    return f"{engine.get('name')} {engine.get('version')}, {engine.get('model')}"


def _describe(url: str, info: dict[str, Any], server: dict[str, Any]) -> str:
    version = server.get("version") or info.get("version") or "of unknown version"
    weights = info.get("weight_version")
    return f"{url}, {version}, {info.get('model_path')}" + ("" if weights is None else f", weights {weights}")


def parity_rows(report: CrossReport, created_at: datetime) -> pa.Table:
    """The report as rows of the parity table (check `cross_engine`): `first_token` counts all sampled tokens of
    the rollout in commit order; `paths` name the turn."""
    rows = [
        {
            "batch_id": report.batch_id,
            "index": found.index,
            "rollout_key": found.rollout_key,
            "check": CHECK,
            "verdict": found.verdict,
            "reason": found.reason,
            "paths": found.paths,
            "engine_a": report.engine_a,
            "engine_b": report.engine_b,
            "first_token": found.position,
            "max_ulp": found.max_ulp,
            "seconds": found.seconds,
            "created_at": created_at,
            "schema_version": SCHEMA_VERSION,
        }
        for found in report.verdicts
    ]
    return rows_to_table(rows, "parity")
