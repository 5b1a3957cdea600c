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
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from rollout import __version__
from rollout.engine.answer import Served, render
from rollout.engine.checkpoint import ARCHITECTURE, Checkpoint, read_checkpoint
from rollout.engine.model import Qwen3
from rollout.engine.params import BadRequest, GenerateRequest, SamplingParams, read_request
from rollout.engine.scheduler import Job, Scheduler
from rollout.errors import BadCheckpoint

BODY_LIMIT = 64 * 2**20
_STEP_SLICE_S = 0.005
Load = Callable[[Checkpoint], Qwen3]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """Routes, and the loop that steps the scheduler while there is work."""

    def __init__(self, served: Served, scheduler: Scheduler, *, load: Load, initializer: Callable[[], None]) -> None:
        """`load` makes the model of new weights; like every step it runs in the worker thread.

        `initializer` runs once in that thread (torch's thread count is a thread's own).
        """
        self._served = served
        self._scheduler = scheduler
        self._load = load
        self._updating = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
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
                web.post("/update_weights_from_disk", self._update_weights),
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

    async def _finish(self, request: GenerateRequest) -> tuple[Job, Served]:
        """Run one request to its end, and what served it; aborts it when the caller is cancelled."""
        while not self._open.is_set():  # new weights are on their way
            await self._open.wait()
        served = self._served
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
        return job, served

    async def _generate(self, http: web.Request) -> web.Response:
        job, served = await self._finish(read_request(await _parsed(http), self._served.limits))
        if job.error is not None:
            return _error(500, job.error, "InternalServerError")
        return _json(render(job, served))

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _object(http)
        rid, everything = body.get("rid"), body.get("abort_all") is True
        for name, (job, _) in self._jobs.items():
            if everything or name == rid:
                job.aborted = True
        return web.Response()

    async def _update_weights(self, http: web.Request) -> web.Response:
        """Load other weights of the same shape: running requests end with the old ones, new ones wait meanwhile."""
        body = await _object(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not isinstance(version, str | None):
            raise BadRequest("model_path must be a string, and weight_version one or absent")
        async with self._updating:
            self._open.clear()
            try:
                while self._jobs:
                    await asyncio.wait([done for _, done in self._jobs.values()])
                self._served = await self._updated(Path(path), version)
            except BadCheckpoint as error:
                return _json({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
            finally:
                self._open.set()
        return _json({"success": True, "message": f"{path} is loaded.", "num_paused_requests": 0})

    async def _updated(self, directory: Path, version: str | None) -> Served:
        checkpoint, old = await asyncio.to_thread(read_checkpoint, directory), self._served
        if checkpoint.config != old.checkpoint.config:
            raise BadCheckpoint(f"{directory}: its shape is not that of {old.checkpoint.directory}")
        model = await asyncio.get_running_loop().run_in_executor(self._worker, self._load, checkpoint)
        self._scheduler.use(model)
        return replace(old, checkpoint=checkpoint, weight_version=old.weight_version if version is None else version)

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, http: web.Request) -> web.Response:
        """Really samples a token, so that a stuck worker shows."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        rid = f"health-{time.monotonic_ns()}"
        job, _ = await self._finish(GenerateRequest(rid=rid, input_ids=(0,), params=params, return_logprob=False))
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
            "max_running_requests": self._scheduler.max_running,
        }
        return _json({"version": __version__, "dp_rank_count": 1, "loads": [load]})

    async def _flush_cache(self, http: web.Request) -> web.Response:
        return web.Response(text="Cache flushed: the embedded engine keeps none between requests.\n")


async def _parsed(http: web.Request) -> Any:
    try:
        return orjson.loads(await http.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def _object(http: web.Request) -> dict[str, Any]:
    body = await _parsed(http)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


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
