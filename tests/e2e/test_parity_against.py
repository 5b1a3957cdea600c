"""`rollout parity --against`: the shipped engine against itself, other weights, other vocabularies, and no engine."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from embedded_checkpoints import make_checkpoint
from faulty_facts import FaultyFacts
from safetensors.torch import load_file, save_file

from rollout.engine.embedded import start_embedded
from rollout.engine.tiny import CHECKPOINT
from rollout.lake import scan_parity


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory):
    """The shipped checkpoint with a little noise in its last norm: near enough to begin with the same tokens."""
    folder = tmp_path_factory.mktemp("other")
    model = folder / "checkpoint"
    shutil.copytree(CHECKPOINT, model)
    weights = load_file(model / "model.safetensors")
    noise = torch.randn(weights["model.norm.weight"].shape, generator=torch.Generator().manual_seed(0))
    weights["model.norm.weight"] = (weights["model.norm.weight"] * (1 + 0.3 * noise)).to(torch.bfloat16)
    (model / "model.safetensors").unlink()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    child = asyncio.run(start_embedded(model, log=folder / "engine.log"))
    yield child.url
    child.stop()


def test_the_same_engine_gives_no_difference_on_staged_tapes(rollout, staged_lake: Path, engine_url: str):
    done = rollout("parity", "mine", "--lake", staged_lake, "--against", engine_url, "--concurrency", "8", "--json")
    assert 0 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert (32, {"equal": 32}) == (report["compared"], report["verdicts"])
    assert report["tokens"] == report["tokens_shared"] > 500 and 0 == report["turns_parted"] == report["max_ulp"]
    assert [{"low": 0, "high": 0, "tokens": report["tokens"]}] == report["histogram"]["float64"]
    assert not (staged_lake / "tables").exists()


def test_other_weights_are_named_by_their_first_token(rollout, finished, other_weights: str):
    lake, _ = finished
    done = rollout("parity", "mine", "--lake", lake, "--against", other_weights, "--rollouts", "8", "--json")
    assert 1 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert (32, 8) == (report["rollouts"], report["compared"])
    assert [4 * k for k in range(8)] == [one["index"] for one in report["results"]]
    moved = [one["first_token"] for one in report["results"] if one["first_token"]]
    assert moved and report["tokens_shared"] < report["tokens"]
    for place in moved:
        assert place["path"].startswith(f"exchange[{place['turn']}].output_ids[{place['token']}]: ")
    text = rollout("parity", "mine", "--lake", lake, "--against", other_weights, "--rollouts", "8").stdout
    assert "log-prob distance in ULP of float64" in text and moved[0]["path"].split(":")[0] in text


def test_a_recorded_comparison_is_in_the_lake_and_in_prefect(quick_rollout, finished, tmp_path: Path, engine_url: str):
    lake = tmp_path / "copy"
    shutil.copytree(finished[0], lake)
    against = ("parity", "mine", "--lake", lake, "--against", engine_url)
    done = quick_rollout(*against, "--rollouts", "4", "--record", "--json")
    assert 0 == done.returncode, done.stderr
    rows = scan_parity(lake, "mine").collect().filter(check="cross_engine").sort("index")
    assert [0, 8, 16, 24] == rows["index"].to_list() and ["equal"] * 4 == rows["verdict"].to_list()
    assert {True} == {engine_url in described for described in rows["engine_b"]}
    shown = json.loads(quick_rollout("parity", "mine", "--lake", lake, "--json").stdout)
    assert ({"equal": 4}, 32) == (shown["cross_engine"], sum(shown["verdicts"].values()))
    artifacts = asyncio.run(_artifacts(quick_rollout.environment["PREFECT_API_URL"]))
    assert "| ULP | tokens | |" in artifacts["rollout-cross-engine"].data
    assert artifacts["rollout-cross-engine-plot"].data.startswith("data:image/svg+xml;base64,")


async def _artifacts(url: str) -> dict:
    from prefect.client.orchestration import PrefectClient

    async with PrefectClient(url) as client:
        return {one.key: one for one in await client.read_artifacts() if one.key}


def test_an_undecided_batch_records_nothing(quick_rollout, staged_lake: Path, engine_url: str):
    done = quick_rollout("parity", "mine", "--lake", staged_lake, "--against", engine_url, "--record")
    assert 2 == done.returncode and "only a published batch" in done.stderr


def test_another_vocabulary_is_refused_before_any_id_is_sent(rollout, finished, tmp_path: Path, engine_url: str):
    child = asyncio.run(start_embedded(make_checkpoint(tmp_path / "small"), log=tmp_path / "small.log"))
    try:
        line = rollout.refused("parity", "mine", "--lake", finished[0], "--against", child.url)
    finally:
        child.stop()
    assert "vocab_size 263, the batch's checkpoint has 896" in line
    silent = FaultyFacts(engine_url)  # an engine that does not say its size is asked to read a text first
    silent.facts = {"vocab_size": None}
    silent.change = lambda request, reply: reply["meta_info"].update(prompt_tokens=7) if "text" in request else None
    with silent.in_thread():
        line = rollout.refused("parity", "mine", "--lake", finished[0], "--against", silent.url)
    assert "its tokenizer makes 7 ids" in line
    assert all("text" in request for request in silent.seen)


def test_an_engine_that_is_not_there_or_goes_is_said_so(rollout, finished, engine_url: str):
    line = rollout.refused("parity", "mine", "--lake", finished[0], "--against", "http://127.0.0.1:9")
    assert line.startswith("--against http://127.0.0.1:9: ")
    dying = FaultyFacts(engine_url)

    def die(request, reply):
        if len(dying.seen) > 20:
            reply["meta_info"]["output_token_logprobs"][0][0] = None

    dying.change = die
    with dying.in_thread():
        done = rollout("parity", "mine", "--lake", finished[0], "--against", dying.url)
    assert 1 == done.returncode and "of 32 rollouts were compared" in done.stderr.splitlines()[-1]
