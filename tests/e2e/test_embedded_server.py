"""The embedded engine as the child process that it is: contract, aborts, errors, bits, its end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from embedded_checkpoints import EOS, make_checkpoint

from rollout.engine.client import EngineClient
from rollout.engine.embedded import start_embedded
from rollout.errors import BadCheckpoint, EngineRefused
from rollout.process import Child
from rollout.tito.tokenizer import Tokenizer

LONG = {"max_new_tokens": 3500, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def child(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    started = asyncio.run(start_embedded(directory, log=tmp_path_factory.mktemp("log") / "engine.log"))
    yield started
    started.stop()
    assert started.process.returncode == 0, started.log.read_text()
    assert started.log.read_text() == ""


@pytest.fixture
async def client(child: Child) -> AsyncIterator[EngineClient]:
    made = EngineClient(child.url)
    yield made
    await made.close()


async def _generate(client: EngineClient, ids: list[int], *, rid: str = "r", **params: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    return await client.generate(body, rid=rid, session_id="s")


async def _get(child: Child, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as http, http.get(child.url + path) as response:
        return response.status, await response.read()


async def _running(child: Child) -> int:
    load = json.loads((await _get(child, "/v1/loads"))[1])["loads"][0]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


async def _until(condition: Callable[[], Any], *, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < end, "took too long"
        await asyncio.sleep(0.01)


async def test_the_answer_has_sglangs_shape(client: EngineClient, directory: Path) -> None:
    ids = list(b"hello engine")
    reply = await _generate(client, ids, rid="my-rid", max_new_tokens=12, sampling_seed=3, ignore_eos=True)
    assert set(reply) == {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    assert meta["id"] == "my-rid"
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (12, 12, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    assert meta["e2e_latency"] > 0
    triples = meta["output_token_logprobs"]
    assert [triple[1] for triple in triples] == reply["output_ids"]
    assert all(len(triple) == 3 and triple[0] <= 0 and triple[2] is None for triple in triples)
    assert reply["text"] == Tokenizer(directory).decode(reply["output_ids"], skip_special_tokens=True)


async def test_text_in_is_its_ids_in_and_logprobs_come_only_when_asked(child: Child, client: EngineClient) -> None:
    params = {"max_new_tokens": 8, "temperature": 0}
    by_ids = await _generate(client, Tokenizer(Path(child.facts["model_path"])).encode("Hi you"), **params)
    by_text = await client.generate({"text": "Hi you", "sampling_params": params}, rid="t", session_id=None)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert "output_token_logprobs" not in by_text["meta_info"]


async def test_stop_ids_and_stop_strings(client: EngineClient, directory: Path) -> None:
    likely = {"logit_bias": {str(EOS): 6.0}, "max_new_tokens": 200, "sampling_seed": 5}
    stopped = await _generate(client, [1, 2], **likely)
    ids = stopped["output_ids"]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert ids[-1] == EOS
    assert stopped["meta_info"]["output_token_logprobs"][-1][1] == EOS
    assert "<|im_end|>" not in stopped["text"]
    kept = await _generate(client, [1, 2], **likely, no_stop_trim=True, skip_special_tokens=False)
    assert kept["text"] == stopped["text"] + "<|im_end|>"

    decode = Tokenizer(directory).decode
    free = await _generate(client, [1, 2], max_new_tokens=80, sampling_seed=6, ignore_eos=True)
    text = decode(free["output_ids"])
    at = next(n for n in range(4, len(text) - 4) if "�" not in text[n : n + 2])
    stop = text[at : at + 2]
    cut = await _generate(client, [1, 2], max_new_tokens=80, sampling_seed=6, ignore_eos=True, stop=[stop])
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["output_ids"] == free["output_ids"][: len(cut["output_ids"])]
    assert stop in decode(cut["output_ids"])
    assert cut["text"] == decode(cut["output_ids"], skip_special_tokens=True).partition(stop)[0]


def _requests(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    draw = random.Random(8)
    return [
        (
            draw.choices(range(256), k=draw.choice([1, 30, 200, 600])),
            {
                "max_new_tokens": draw.randrange(5, 60),
                "temperature": draw.choice([0.7, 1.0]),
                "top_p": draw.choice([1.0, 0.9]),
                "sampling_seed": draw.getrandbits(31),
                "ignore_eos": True,
            },
        )
        for _ in range(count)
    ]


async def test_sixteen_wide_gives_the_bits_of_one_alone_and_of_another_process(
    client: EngineClient, directory: Path, tmp_path: Path
) -> None:
    requests = _requests(24)
    gate = asyncio.Semaphore(16)

    async def one(engine: EngineClient, n: int) -> Any:
        async with gate:
            ids, params = requests[n]
            reply = await _generate(engine, ids, rid=f"w{n}", **params)
            return reply["meta_info"]["output_token_logprobs"]

    wide = await asyncio.gather(*[one(client, n) for n in range(len(requests))])
    alone = [await one(client, n) for n in range(len(requests))]
    assert wide == alone
    other = await start_embedded(directory, log=tmp_path / "log")
    try:
        second = EngineClient(other.url)
        order = random.Random(1).sample(range(len(requests)), k=len(requests))
        again = dict(zip(order, await asyncio.gather(*[one(second, n) for n in order]), strict=True))
        await second.close()
    finally:
        other.stop()
    assert [again[n] for n in range(len(requests))] == alone


async def test_abort_ends_with_the_partial_tokens(child: Child, client: EngineClient) -> None:
    running = [asyncio.create_task(_generate(client, [n], rid=f"a{n}", **LONG)) for n in range(3)]
    await _until(lambda: _busy(child, 3), within_s=5)
    await asyncio.sleep(0.2)
    started = time.monotonic()
    await client.abort("a1")
    reply = await running[1]
    assert time.monotonic() - started < 1
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    count = reply["meta_info"]["completion_tokens"]
    assert 0 < count < 3500
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) == count
    assert not running[0].done()
    url = child.url + "/abort_request"
    async with aiohttp.ClientSession() as http, http.post(url, json={"abort_all": True}) as response:
        assert response.status == 200
    for task in (running[0], running[2]):
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    await client.abort("long gone")


async def _busy(child: Child, count: int) -> bool:
    return await _running(child) == count


async def test_a_client_that_goes_away_ends_its_generation(child: Child, client: EngineClient) -> None:
    task = asyncio.create_task(_generate(client, [1], rid="gone", **LONG))
    await _until(lambda: _busy(child, 1), within_s=5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _until(lambda: _busy(child, 0), within_s=1)
    assert (await _generate(client, [1], rid="gone", max_new_tokens=2))["meta_info"]["completion_tokens"] <= 2


async def test_one_name_at_a_time(child: Child, client: EngineClient) -> None:
    task = asyncio.create_task(_generate(client, [1], rid="twin", **LONG))
    await _until(lambda: _busy(child, 1), within_s=5)
    with pytest.raises(EngineRefused, match="Duplicate request ID"):
        await _generate(client, [1], rid="twin", max_new_tokens=1)
    await client.abort("twin")
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_health_is_heard_while_it_works(child: Child, client: EngineClient) -> None:
    tasks = [asyncio.create_task(_generate(client, [1] * 400, rid=f"h{n}", **LONG)) for n in range(4)]
    await _until(lambda: _busy(child, 4), within_s=5)
    for path in ("/health", "/health_generate"):
        started = time.monotonic()
        assert (await _get(child, path))[0] == 200
        assert time.monotonic() - started < 1
    for n in range(4):
        await client.abort(f"h{n}")
    await asyncio.gather(*tasks)


async def test_what_it_says_of_itself(child: Child, client: EngineClient, directory: Path) -> None:
    info = await client.model_info()
    assert info["model_path"] == str(directory)
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    assert info["context_length"] == child.facts["context_length"] == 4096
    for path in ("/get_model_info", "/server_info", "/v1/models", "/v1/loads", "/flush_cache"):
        assert (await _get(child, path))[0] == 200
    status, body = await _get(child, "/metrics")
    assert status == 404
    assert json.loads(body)["code"] == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"{}", "give either input_ids or text"),
        (b'{"input_ids": [1, 263]}', "input_ids has the id 263, which is outside the vocabulary [0, 262]."),
        (b'{"input_ids": [1], "sampling_params": {"top_p": 2}}', "top_p must be in (0, 1], got 2."),
        (
            json.dumps({"input_ids": [1] * 4200}).encode(),
            "The input (4200 tokens) is longer than the model's context length (4096 tokens).",
        ),
    ],
)
async def test_errors_have_sglangs_shape(child: Child, body: bytes, message: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(child.url + "/generate", data=body) as response:
        assert response.status == 400
        error = await response.json()
    assert error["message"].startswith(message)
    del error["message"]
    assert error == {"object": "error", "type": "BadRequestError", "param": None, "code": 400}
    assert (await _get(child, "/health_generate"))[0] == 200


async def test_a_checkpoint_that_breaks_only_on_loading_is_still_a_bad_checkpoint(
    directory: Path, tmp_path: Path
) -> None:
    broken = make_checkpoint(tmp_path / "model")
    (broken / "tokenizer.json").write_text("{}")
    log = tmp_path / "log"
    log.write_text("BadCheckpoint: of an earlier start\n")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: not a readable"):
        await start_embedded(broken, log=log)


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rollout.engine.embedded", *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.full
def test_bad_input_is_one_line_and_exit_code_2(directory: Path, tmp_path: Path) -> None:
    nowhere = _run("--model", str(tmp_path / "nowhere"))
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert nowhere.stderr == f"BadCheckpoint: {tmp_path / 'nowhere'}: no such directory; " + (
        "give a Hugging Face model directory\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = _run("--model", str(directory), "--port", str(port))
    assert (busy.returncode, busy.stdout) == (2, "")
    assert busy.stderr.startswith(f"PortInUse: 127.0.0.1:{port} cannot be bound")
    assert busy.stderr.count("\n") == 1
    missing = _run("--model", str(directory), "--device", "cuda:99")
    assert missing.returncode == 2
    assert missing.stderr.startswith(f"BadCheckpoint: {directory}: cannot be loaded on cuda:99")
    assert missing.stderr.count("\n") == 1


PARENT = """
import asyncio, sys, time
from pathlib import Path
from rollout.engine.embedded import start_embedded
child = asyncio.run(start_embedded(Path(sys.argv[1]), log=Path(sys.argv[2])))
print(child.process.pid, flush=True)
time.sleep(60)
"""


def test_it_dies_with_its_parent(directory: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(directory), str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
        parent.wait(5)
    end = time.monotonic() + 5
    while _alive(pid):
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        # A killed orphan may stay a zombie until its adopter reaps it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_the_shipped_checkpoint_gives_transformers_logprobs(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    from rollout.engine.tiny import CHECKPOINT

    tokenizer = Tokenizer(CHECKPOINT)
    prompt = tokenizer.encode("<|im_start|>user\nWhat is 12 plus 30?<|im_end|>\n<|im_start|>assistant\n")
    child = await start_embedded(None, log=tmp_path / "log")
    try:
        client = EngineClient(child.url)
        reply = await _generate(client, prompt, max_new_tokens=60, temperature=0.7, sampling_seed=1)
        await client.close()
    finally:
        child.stop()
    output, meta = reply["output_ids"], reply["meta_info"]
    model = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    expected = (logits.double() / 0.7).log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    got = torch.tensor([triple[0] for triple in meta["output_token_logprobs"]], dtype=torch.float64)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
