"""Requests in flight together: each one's bits are its own, and each ends for the right reason."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from embedded_checkpoints import EOS, load, make_checkpoint
from torch import Tensor

from rollout.engine.model import KvCache, Qwen3
from rollout.engine.params import GenerateRequest, SamplingParams
from rollout.engine.scheduler import Job, Scheduler
from rollout.tito.tokenizer import Tokenizer

Bits = list[tuple[int, bytes]]
pytestmark = pytest.mark.usefixtures("one_thread")

STOPS = frozenset({EOS, *range(40, 50)})
"""Several, so that a random model soon samples one."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("scheduler") / "model")


@pytest.fixture(scope="module")
def model(directory: Path) -> Qwen3:
    return load(directory)


@pytest.fixture
def scheduler(model: Qwen3, directory: Path) -> Scheduler:
    return _scheduler(model, directory)


def _scheduler(model: Qwen3, directory: Path, *, max_running: int = 64) -> Scheduler:
    return Scheduler(model, stop_ids=STOPS, decode=Tokenizer(directory).decode, max_running=max_running)


def _request(name: str, ids: Sequence[int], **params: object) -> GenerateRequest:
    return GenerateRequest(
        rid=name,
        input_ids=tuple(ids),
        params=SamplingParams(**params),
        return_logprob=True,  # type: ignore[arg-type]
    )


def _finish_all(scheduler: Scheduler, jobs: Sequence[Job], *, limit: int = 5_000) -> None:
    for _ in range(limit):
        if all(job.done for job in jobs):
            return
        scheduler.step()
    raise AssertionError("jobs do not end")


def _run_one(scheduler: Scheduler, request: GenerateRequest) -> Job:
    job = scheduler.add(request)
    _finish_all(scheduler, [job])
    return job


def _bits(job: Job) -> Bits:
    assert job.error is None
    assert len(job.log_probs) == len(job.output_ids)
    return [(token, struct.pack("<d", value)) for token, value in zip(job.output_ids, job.log_probs, strict=True)]


def _mixed_requests(seed: int, count: int) -> list[GenerateRequest]:
    draw, requests = random.Random(seed), []
    for n in range(count):
        length = draw.choice([1, 2, 17, 64, 65, 200, 511, 512, 513, 700]) if n % 3 == 0 else draw.randrange(5, 250)
        params = SamplingParams(
            max_new_tokens=draw.randrange(1, 40),
            temperature=draw.choice([0.7, 0.7, 1.0, 1.0, 0.0]),
            top_p=draw.choice([1.0, 1.0, 0.95]),
            top_k=draw.choice([-1, -1, 20]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            ignore_eos=draw.random() < 0.5,
            sampling_seed=draw.getrandbits(31),
        )
        ids = draw.choices(range(256), k=length)
        requests.append(GenerateRequest(rid=f"r{n}", input_ids=tuple(ids), params=params, return_logprob=True))
    return requests


@pytest.mark.parametrize("width", [16, 40])
@pytest.mark.parametrize("block", [None, 1])
def test_a_request_has_the_same_bits_alone_and_among_others(directory: Path, width: int, block: int | None) -> None:
    model = load(directory, block=block)
    requests = _mixed_requests(width, width)
    alone = [_bits(_run_one(_scheduler(model, directory), request)) for request in requests]
    assert sum(len(bits) for bits in alone) > 10 * width

    for arrivals in range(2):
        draw = random.Random(arrivals)
        crowd = _scheduler(model, directory, max_running=(64, 11)[arrivals])
        jobs: list[Job] = []
        widest = 0
        for request in draw.sample(requests, k=len(requests)):
            jobs.append(crowd.add(request))
            for _ in range(draw.choice([0, 0, 0, 1, 3])):
                crowd.step()
            widest = max(widest, crowd.counts[0])
        _finish_all(crowd, jobs)
        assert widest >= min(8, width)
        for job in jobs:
            assert _bits(job) == alone[int(job.request.rid[1:])]


def test_aborted_neighbours_do_not_show(model: Qwen3, directory: Path) -> None:
    requests = _mixed_requests(3, 16)
    alone = [_bits(_run_one(_scheduler(model, directory), request)) for request in requests]
    crowd, draw = _scheduler(model, directory), random.Random(4)
    jobs = [crowd.add(request) for request in requests]
    while not all(job.done for job in jobs):
        crowd.step()
        draw.choice(jobs[::2]).aborted = True
    for job, bits in zip(jobs, alone, strict=True):
        assert _bits(job) == (bits[: len(job.output_ids)] if job in jobs[::2] else bits)
    assert any(job.finish == {"type": "abort", "message": "aborted by request"} for job in jobs)


def test_a_seed_repeats_and_without_one_samples_differ(scheduler: Scheduler) -> None:
    request = _request("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True, sampling_seed=7)
    first, second = _run_one(scheduler, request), _run_one(scheduler, request)
    assert _bits(first) == _bits(second)
    other = _run_one(scheduler, replace(request, params=replace(request.params, sampling_seed=8)))
    assert other.output_ids != first.output_ids
    free = replace(request, params=replace(request.params, sampling_seed=None))
    assert _run_one(scheduler, free).output_ids != _run_one(scheduler, free).output_ids


def _find(scheduler: Scheduler, wanted: Callable[[Job], bool], **params: object) -> Job:
    """The first of many seeds whose job is as wanted."""
    for seed in range(300):
        job = _run_one(scheduler, _request("find", [5, 6, 7], sampling_seed=seed, **params))
        if wanted(job):
            return job
    raise AssertionError("no seed gives that")


def test_stop_ids_end_a_request_and_stay_in_its_ids(scheduler: Scheduler) -> None:
    job = _find(scheduler, lambda job: 5 < len(job.output_ids) < 100, max_new_tokens=100)
    assert job.finish == {"type": "stop", "matched": job.output_ids[-1]}
    assert job.output_ids[-1] in STOPS
    assert STOPS.isdisjoint(job.output_ids[:-1])
    seed, size = job.request.params.sampling_seed, len(job.output_ids)

    through = _run_one(
        scheduler, _request("b", [5, 6, 7], sampling_seed=seed, max_new_tokens=size + 5, ignore_eos=True)
    )
    assert through.finish == {"type": "length", "length": size + 5}
    assert through.output_ids[:size] == job.output_ids

    own = {"stop_token_ids": frozenset({job.output_ids[2]}), "max_new_tokens": 100}
    stopped = _run_one(scheduler, _request("c", [5, 6, 7], sampling_seed=seed, **own))
    assert stopped.finish == {"type": "stop", "matched": job.output_ids[2]}
    assert stopped.output_ids == job.output_ids[: job.output_ids.index(job.output_ids[2]) + 1]
    ignored = _run_one(scheduler, _request("d", [5, 6, 7], sampling_seed=seed, ignore_eos=True, **own))
    assert ignored.finish == {"type": "length", "length": 100}


def test_the_last_allowed_token_ends_by_length_even_if_it_is_a_stop_id(scheduler: Scheduler) -> None:
    job = _find(scheduler, lambda job: 5 < len(job.output_ids) < 100, max_new_tokens=100)
    size = len(job.output_ids)
    cut = _request("e", [5, 6, 7], sampling_seed=job.request.params.sampling_seed, max_new_tokens=size)
    assert _run_one(scheduler, cut).finish == {"type": "length", "length": size}


def test_min_new_tokens_holds_stop_ids_back(scheduler: Scheduler) -> None:
    job = _find(scheduler, lambda job: len(job.output_ids) < 20, max_new_tokens=100)
    params = {"sampling_seed": job.request.params.sampling_seed, "max_new_tokens": 100, "min_new_tokens": 30}
    later = _run_one(scheduler, _request("f", [5, 6, 7], **params))
    assert len(later.output_ids) > 30
    assert STOPS.isdisjoint(later.output_ids[:30])


def test_a_stop_string_across_tokens_ends_at_its_last_token(scheduler: Scheduler, directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    params = {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 1}
    free = _run_one(scheduler, _request("g", [9], **params))
    ends = [n for n in range(10, 55) if "�" not in tokenizer.decode(free.output_ids[n - 3 : n])]
    assert ends
    stop = tokenizer.decode(free.output_ids[ends[0] - 3 : ends[0]])
    first = next(n for n in range(1, 61) if stop in tokenizer.decode(free.output_ids[:n]))
    job = _run_one(scheduler, _request("h", [9], stop=("never in it", stop), **params))
    assert job.finish == {"type": "stop", "matched": stop}
    assert _bits(job) == _bits(free)[:first]


def test_abort_takes_effect_waiting_prefilling_and_running(model: Qwen3, directory: Path) -> None:
    scheduler = _scheduler(model, directory, max_running=2)
    long = {"max_new_tokens": 3000, "ignore_eos": True}
    running = scheduler.add(_request("running", [1], **long))
    prefilling = scheduler.add(_request("prefilling", [1] * 2000, **long))
    waiting = scheduler.add(_request("waiting", [1], **long))
    scheduler.step()
    assert scheduler.counts == (2, 1)
    assert not prefilling.output_ids
    for job in (running, prefilling, waiting):
        job.aborted = True
    assert set(map(id, scheduler.step())) == set(map(id, (running, prefilling, waiting)))
    assert all(job.finish is not None and job.finish["type"] == "abort" for job in (running, prefilling, waiting))
    assert running.output_ids
    assert not waiting.output_ids
    assert scheduler.counts == (0, 0)
    assert scheduler.tokens == 0
    assert scheduler.step() == []


def test_no_more_run_than_allowed_and_none_is_forgotten(model: Qwen3, directory: Path) -> None:
    scheduler = _scheduler(model, directory, max_running=3)
    jobs = [scheduler.add(_request(str(n), [n], max_new_tokens=5 * (n % 4), ignore_eos=True)) for n in range(12)]
    seen, most = [], 0
    while not all(job.done for job in jobs):
        seen += scheduler.step()
        most = max(most, scheduler.counts[0])
    assert most == 3
    assert sorted(int(job.request.rid) for job in seen) == list(range(12))
    assert jobs[0].finish == {"type": "length", "length": 0}
    assert jobs[0].output_ids == []


class GivesNan(Qwen3):
    """Injects the fault: a prompt that begins with token 13 gives no finite logits."""

    def prefill(self, cache: KvCache, ids: Sequence[int]) -> Tensor:
        logits = super().prefill(cache, ids)
        return logits * float("nan") if ids[0] == 13 else logits


def test_a_broken_row_fails_alone(directory: Path) -> None:
    model = load(directory)
    model.__class__ = GivesNan
    scheduler = _scheduler(model, directory)
    broken = scheduler.add(_request("broken", [13, 1], max_new_tokens=5))
    sound = scheduler.add(_request("sound", [12, 1], max_new_tokens=5, ignore_eos=True))
    _finish_all(scheduler, [broken, sound])
    assert broken.error == "the model gave no finite logits"
    assert broken.finish is None
    assert sound.finish == {"type": "length", "length": 5}


def test_fail_all_ends_everything(scheduler: Scheduler) -> None:
    jobs = [scheduler.add(_request(str(n), [n], max_new_tokens=50, ignore_eos=True)) for n in range(3)]
    scheduler.step()
    assert set(map(id, scheduler.fail_all("gone"))) == set(map(id, jobs))
    assert all(job.error == "gone" for job in jobs)
    assert scheduler.counts == (0, 0)
