"""Continuous batching: requests join and leave between steps, and none of it shows in their bits.

One step prefills waiting requests, piece by piece until PREFILL_TOKENS tokens are computed, then
gives every running request one token, in blocks of the model's width. What a request gets depends
on its own prompt, parameters and seed: see `model` and `sampler` for why. Nothing of one request is
reused for another, so `cached_tokens` is always 0.

What limits speed (CPU time on one idle core; hidden 128, 4 layers, vocabulary 463): a decode step
that is 16 wide takes 2.3 ms behind contexts of 250 tokens, 1 wide 0.9 ms; sampling 0.16 ms; a
prompt of 200 tokens 5.9 ms. So about 6,500 tokens/s 16 wide, and about 2,500 when every 25 tokens
need a prompt of 200 first. In the step, attention's kernels take about half (they run row by row),
the row loop's calls a fifth, matrix products a fifth. Prefill is at the core's arithmetic limit;
only reusing prefixes would save more, and cached_tokens would have to say so.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.model import PREFILL_TOKENS, KvCache, Qwen3
from rollout.engine.params import GenerateRequest
from rollout.engine.sampler import SamplingState, sample

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way: what it asked, what it has so far, and how it ended.

    finish: SGLang's finish_reason, None while running. error: why the engine failed it. `aborted`
    may be set from another thread than the one that steps; it takes effect at the next step.
    """

    request: GenerateRequest
    state: SamplingState
    arrived: float
    cache: KvCache | None = None
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    error: str | None = None
    aborted: bool = False
    ended: float = 0.0

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None


class Scheduler:
    """Runs jobs to their end. `add` and `abort` may be called while another thread is in `step`."""

    def __init__(self, model: Qwen3, *, stop_ids: frozenset[int], decode: Decode, max_running: int = 32) -> None:
        """`stop_ids` end every request that does not ignore them; `decode` gives text for stop strings."""
        self._model = model
        self._stop_ids = stop_ids
        self._decode = decode
        self.max_running = max_running
        self._inbox: deque[Job] = deque()
        self._waiting: list[Job] = []
        self._prefilling: deque[Job] = deque()
        self._running: list[Job] = []

    def add(self, request: GenerateRequest) -> Job:
        """Queue a request; a later `step` returns its job when it is done."""
        params = request.params
        seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
        stops = self._stop_ids | params.stop_token_ids
        job = Job(
            request=request,
            state=SamplingState(params=params, seed=seed, position=len(request.input_ids), stop_ids=stops),
            arrived=time.monotonic(),
        )
        self._inbox.append(job)
        return job

    def use(self, model: Qwen3) -> None:
        """Another model of the same shape from now on; only while no request is under way but aborted ones."""
        self._model = model

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that are (running, waiting)."""
        return len(self._running) + len(self._prefilling), len(self._waiting) + len(self._inbox)

    @property
    def tokens(self) -> int:
        """Tokens of the running requests' caches."""
        caches = [job.cache for job in [*self._running, *self._prefilling]]
        return sum(cache.length for cache in caches if cache is not None)

    def step(self) -> list[Job]:
        """Do one round of work; the jobs that ended in it. Empty when there is nothing to do."""
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
        for job in [*self._waiting, *self._prefilling, *self._running]:
            if job.aborted:
                _end(job, {"type": "abort", "message": "aborted by request"})
            elif job.request.params.max_new_tokens == 0:
                _end(job, {"type": "length", "length": 0})
        ended = self._sweep()
        self._admit()
        self._prefill(PREFILL_TOKENS)
        for start in range(0, len(self._running), self._model.block):
            self._decode_block(self._running[start : start + self._model.block])
        return ended + self._sweep()

    def fail_all(self, message: str) -> list[Job]:
        """End every job with an error, after a step that raised."""
        for job in [*self._waiting, *self._prefilling, *self._running]:
            job.error = message
        return self._sweep()

    def _admit(self) -> None:
        room = self.max_running - len(self._running) - len(self._prefilling)
        for job in self._waiting[:room]:
            job.cache = self._model.new_cache()
            self._prefilling.append(job)
        del self._waiting[:room]

    def _prefill(self, budget: int) -> None:
        while self._prefilling and budget > 0:
            job = self._prefilling[0]
            assert job.cache is not None
            ids = job.request.input_ids
            piece = ids[job.cache.length : job.cache.length + PREFILL_TOKENS]
            logits = self._model.prefill(job.cache, piece)
            budget -= len(piece)
            if job.cache.length == len(ids):
                self._take(logits, [job])
                self._prefilling.popleft()
                self._running.append(job)

    def _decode_block(self, jobs: list[Job]) -> None:
        jobs = [job for job in jobs if not job.done]
        if jobs:
            caches = [job.cache for job in jobs if job.cache is not None]
            self._take(self._model.decode(caches, [job.output_ids[-1] for job in jobs]), jobs)

    def _take(self, logits: Any, jobs: list[Job]) -> None:
        """Sample one token for each job from its row of logits, and see whether the job ends."""
        results = sample(logits.cpu().numpy(), [job.state for job in jobs])
        for job, result in zip(jobs, results, strict=True):
            if result is None:
                job.error = "the model gave no finite logits"
                continue
            job.output_ids.append(result.token)
            job.log_probs.append(result.log_prob)
            job.state.note(result.token)
            reason = self._finish_reason(job)
            if reason is not None:
                _end(job, reason)

    def _finish_reason(self, job: Job) -> dict[str, Any] | None:
        """SGLang's order: length, then stop ids (unless ignore_eos, which ignores them all), then stop strings."""
        params, token = job.request.params, job.output_ids[-1]
        if len(job.output_ids) >= params.max_new_tokens:
            return {"type": "length", "length": params.max_new_tokens}
        if not params.ignore_eos and token in job.state.stop_ids:
            return {"type": "stop", "matched": token}
        if params.stop:
            # Every token of a match has at least one byte of it, so this many tokens hold it whole.
            reach = max(len(stop.encode("utf-8", "replace")) for stop in params.stop) + 1
            tail = self._decode(job.output_ids[-reach:])
            for stop in params.stop:
                if stop in tail:
                    return {"type": "stop", "matched": stop}
        return None

    def _sweep(self) -> list[Job]:
        """Take out the jobs that have ended."""
        ended = [job for job in [*self._waiting, *self._prefilling, *self._running] if job.done]
        if ended:
            self._waiting = [job for job in self._waiting if not job.done]
            self._prefilling = deque(job for job in self._prefilling if not job.done)
            self._running = [job for job in self._running if not job.done]
            for job in ended:
                job.cache = None
        return ended


def _end(job: Job, reason: dict[str, Any]) -> None:
    job.finish = reason
    job.ended = time.monotonic()
