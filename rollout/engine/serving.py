"""The embedded engine's HTTP surface: SGLang's `/generate` contract over aiohttp.

The event loop owns the queue and the answers; one worker thread runs the scheduler's steps, so that
health checks and aborts are heard while a step computes. A request whose client is gone is aborted.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from rollout import __version__
from rollout.engine.checkpoint import ARCHITECTURE, Checkpoint
from rollout.engine.params import BadRequest, GenerateRequest, Limits, SamplingParams, read_request
from rollout.engine.scheduler import Job, Scheduler
from rollout.tito.tokenizer import Tokenizer

BODY_LIMIT = 64 * 2**20
_STEP_SLICE_S = 0.005
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What is served: the checkpoint, its tokenizer, and the names that the answers give them."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    context: int
    weight_version: str

    @property
    def limits(self) -> Limits:
        return Limits(vocabulary=self.checkpoint.config.vocabulary, context=self.context, encode=self.tokenizer.encode)


class EngineServer:
    """Routes, and the loop that steps the scheduler while there is work."""

    def __init__(self, served: Served, scheduler: Scheduler, *, initializer: Callable[[], None]) -> None:
        """`initializer` runs once in the worker thread (torch's thread count is a thread's own)."""
        self._served = served
        self._scheduler = scheduler
        self._jobs: dict[str, tuple[Job, asyncio.Future[None]]] = {}
        self._wake = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="steps", initializer=initializer)

    def app(self) -> web.Application:
        """The application; its steps run from startup to cleanup."""
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.get("/v1/models", self._models),
                web.get("/v1/loads", self._loads),
                web.get("/flush_cache", self._flush_cache),
                web.post("/flush_cache", self._flush_cache),
            ]
        )
        app.cleanup_ctx.append(self._steps)
        return app

    async def _steps(self, app: web.Application) -> Any:
        task = asyncio.create_task(self._run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._worker.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._jobs:
                for job in await loop.run_in_executor(self._worker, self._step_slice):
                    self._settle(job)

    def _step_slice(self) -> list[Job]:
        """Steps until something ended or the slice's time is over; handing over costs as much as a small step."""
        end = time.monotonic() + _STEP_SLICE_S
        try:
            while not (ended := self._scheduler.step()) and time.monotonic() < end:
                pass
            return ended
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            return self._scheduler.fail_all(f"the engine failed: {type(error).__name__}: {error}")

    def _settle(self, job: Job) -> None:
        entry = self._jobs.pop(job.request.rid, None)
        if entry is not None and not entry[1].done():
            entry[1].set_result(None)

    async def _finish(self, request: GenerateRequest) -> Job:
        """Run one request to its end; aborts it when the caller is cancelled."""
        if request.rid in self._jobs:
            raise BadRequest(f"Duplicate request ID: {request.rid}")
        job, done = self._scheduler.add(request), asyncio.get_running_loop().create_future()
        self._jobs[request.rid] = job, done
        self._wake.set()
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            job.aborted = True
            raise
        return job

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.read()
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        job = await self._finish(read_request(parsed, self._served.limits))
        if job.error is not None:
            return _error(500, job.error, "InternalServerError")
        return _json(render(job, self._served))

    async def _abort(self, http: web.Request) -> web.Response:
        try:
            body = orjson.loads(await http.read())
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        rid, everything = body.get("rid"), body.get("abort_all") is True
        for name, (job, _) in self._jobs.items():
            if everything or name == rid:
                job.aborted = True
        return web.Response()

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, http: web.Request) -> web.Response:
        """Really samples a token, so that a stuck worker shows."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        rid = f"health-{time.monotonic_ns()}"
        job = await self._finish(GenerateRequest(rid=rid, input_ids=(0,), params=params, return_logprob=False))
        return web.Response(status=200 if job.error is None else 503)

    async def _model_info(self, http: web.Request) -> web.Response:
        served, config = self._served, self._served.checkpoint.config
        return _json(
            {
                "model_path": str(served.checkpoint.directory),
                "tokenizer_path": str(served.checkpoint.directory),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": served.weight_version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "qwen3",
                "architectures": [ARCHITECTURE],
                "context_length": served.context,
                "vocab_size": config.vocabulary,
            }
        )

    async def _server_info(self, http: web.Request) -> web.Response:
        directory = str(self._served.checkpoint.directory)
        return _json(
            {
                "model_path": directory,
                "served_model_name": directory,
                "context_length": self._served.context,
                "weight_version": self._served.weight_version,
                "disable_radix_cache": True,
                "enable_deterministic_inference": True,
                "version": f"rollout-lake {__version__} embedded",
            }
        )

    async def _models(self, http: web.Request) -> web.Response:
        name = str(self._served.checkpoint.directory)
        card = {"id": name, "object": "model", "owned_by": "rollout-lake", "max_model_len": self._served.context}
        return _json({"object": "list", "data": [card]})

    async def _loads(self, http: web.Request) -> web.Response:
        running, waiting = self._scheduler.counts
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_used_tokens": self._scheduler.tokens,
        }
        return _json({"version": __version__, "dp_rank_count": 1, "loads": [load]})

    async def _flush_cache(self, http: web.Request) -> web.Response:
        return web.Response(text="Cache flushed: the embedded engine keeps none between requests.\n")


def render(job: Job, served: Served) -> dict[str, Any]:
    """SGLang's answer to a `/generate` request, from a job that ended."""
    request, count = job.request, len(job.output_ids)
    version = served.weight_version
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": job.finish,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
        "num_retractions": 0,
        "e2e_latency": job.ended - job.arrived,
    }
    if request.return_logprob:
        pairs = zip(job.log_probs, job.output_ids, strict=True)
        meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
    return {"text": _text(job, served.tokenizer), "output_ids": job.output_ids, "meta_info": meta}


def _text(job: Job, tokenizer: Tokenizer) -> str:
    """The output as text: a stop token dropped and a stop string cut off, unless no_stop_trim."""
    params, ids = job.request.params, job.output_ids
    matched = (job.finish or {}).get("matched")
    trim = not params.no_stop_trim
    if trim and isinstance(matched, int):
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    if trim and isinstance(matched, str) and matched in text:
        text = text[: text.index(matched)]
    return text


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _error(status: int, message: str, kind: str = "BadRequestError") -> web.Response:
    shape = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return web.Response(body=orjson.dumps(shape), status=status, content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in SGLang's error shape."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except web.HTTPException as error:
        return _error(error.status, error.reason, type(error).__name__.removeprefix("HTTP"))
