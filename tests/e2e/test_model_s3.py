"""`--model s3://...` against a real object store: fetched once and whole, or refused in one line."""

import asyncio
import json
import signal
import socket
import time
from pathlib import Path

import pytest
from command import Rollout
from embedded_checkpoints import make_checkpoint
from object_store import ObjectStore, StallingLine, aws_environment

from rollout.batch.model_source import fetch_model
from rollout.batch.prepare import RunOrigin, prepare
from rollout.engine.embedded import start_embedded
from rollout.engine.tiny import CHECKPOINT
from rollout.errors import BadCheckpoint, BadConfig
from rollout.lake import scan_samples
from rollout.lake.staging import create_plan
from rollout.parity.projections import same_rows

PREFIX = "models/tiny"
WEIGHTS = f"{PREFIX}/model.safetensors"
STALL_BYTES = 200_000
"""The texts' answers are shorter, the weights' is longer."""


@pytest.fixture
def bucket(object_store: ObjectStore) -> str:
    """A bucket with the shipped checkpoint under PREFIX."""
    name = object_store.bucket()
    object_store.upload(CHECKPOINT, name, PREFIX)
    return name


@pytest.fixture
def s3_rollout(object_store: ObjectStore, tmp_path: Path) -> Rollout:
    """The command with a state folder of its own, which has no models yet."""
    return Rollout(home=tmp_path / "home", cwd=tmp_path, environment=object_store.environment)


@pytest.fixture
def in_process(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment of a command for this process; where its models go."""
    for name, value in {**object_store.environment, "ROLLOUT_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "home" / "models"


def visible(home: Path) -> list[Path]:
    return [path for path in (home / "models").glob("*") if not path.name.startswith(".")]


def leftovers(home: Path) -> list[Path]:
    return list((home / "models").glob(".*.part"))


@pytest.mark.full
def test_a_batch_has_the_rows_of_the_local_checkpoint(
    object_store: ObjectStore, bucket: str, prefect_url: str, finished, batch_command: list[str], tmp_path: Path
):
    environment = {**object_store.environment, "PREFECT_API_URL": prefect_url}
    command = Rollout(home=tmp_path / "home", cwd=tmp_path, environment=environment)
    command.succeeds(*batch_command, "--model", f"s3://{bucket}/{PREFIX}")
    local, fetched = (scan_samples(lake, batch="mine").collect() for lake in (finished[0], tmp_path / "lake"))
    assert [] == same_rows(local.to_arrow(), fetched.to_arrow())
    assert {f"s3://{bucket}/{PREFIX}"} == {engine["model"] for engine in fetched["engine"]}
    assert 1 == object_store.reads(bucket, WEIGHTS), "the command or its flow fetched it again"
    assert "published already" in command.succeeds("run", "--batch-id", "mine")
    command.succeeds(*batch_command, "--batch-id", "other", "--model", f"s3://{bucket}/{PREFIX}/", "--dry-run")
    assert 1 == object_store.reads(bucket, WEIGHTS), "the second run fetched it again"
    sample = fetched["sample_id"][0]
    elsewhere = Rollout(home=tmp_path / "looker", cwd=tmp_path, environment=object_store.environment)
    assert "[prompt, " in elsewhere.succeeds("show", "mine", "--sample", sample)
    (folder,) = visible(tmp_path / "looker")
    assert not (folder / "model.safetensors").exists() and 1 == object_store.reads(bucket, WEIGHTS)
    elsewhere.succeeds("parity", "mine")


def test_a_staged_batch_is_checked_with_the_fetched_tokenizer(
    object_store: ObjectStore, bucket: str, in_process: Path, s3_rollout: Rollout, staged_lake: Path
):
    plan = staged_lake / "staging" / "mine" / "plan.json"
    facts = json.loads(plan.read_bytes())
    facts["config"]["model"] = f"s3://{bucket}/{PREFIX}"
    plan.write_text(json.dumps(facts))
    s3_rollout.succeeds("parity", "mine", "--lake", staged_lake)
    (folder,) = visible(s3_rollout.home)
    assert (folder / "tokenizer.json").is_file() and 0 == object_store.reads(bucket, WEIGHTS)


def test_two_processes_fetch_once(object_store: ObjectStore, bucket: str, s3_rollout: Rollout):
    with StallingLine(object_store.url, STALL_BYTES) as line:
        s3_rollout.environment = aws_environment(line.url)
        arguments = ("run", "--dry-run", "--model", f"s3://{bucket}/{PREFIX}")
        first = s3_rollout.start(*arguments)
        assert line.stalled.wait(120)
        second = s3_rollout.start(*arguments)
        assert second.process.stderr is not None
        assert "waiting for another process" in second.process.stderr.readline()
        line.open.set()
        assert [0, 0] == [run.wait().returncode for run in (first, second)]
    assert 1 == object_store.reads(bucket, WEIGHTS)
    assert 1 == len(visible(s3_rollout.home)) and not leftovers(s3_rollout.home)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)], ids=["KILL", "INT"])
def test_a_fetch_that_is_ended_shows_nothing_and_is_made_anew(
    object_store: ObjectStore, bucket: str, s3_rollout: Rollout, number: int, code: int
):
    arguments = ("run", "--dry-run", "--model", f"s3://{bucket}/{PREFIX}")
    with StallingLine(object_store.url, STALL_BYTES) as line:
        s3_rollout.environment = aws_environment(line.url)
        run = s3_rollout.start(*arguments)
        assert line.stalled.wait(120)
        assert leftovers(s3_rollout.home)
        began = time.monotonic()
        assert code == run.end(number)
        assert time.monotonic() - began < 20, "it waited for bytes that did not come"
        assert [] == visible(s3_rollout.home)
        assert (number == signal.SIGKILL) == bool(leftovers(s3_rollout.home))
        line.open.set()
        s3_rollout.succeeds(*arguments)
    (folder,) = visible(s3_rollout.home)
    wanted = {path.name: path.read_bytes() for path in CHECKPOINT.iterdir()}
    assert wanted == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert [] == leftovers(s3_rollout.home)


async def test_a_model_that_changed_is_refused_when_the_batch_goes_on(
    object_store: ObjectStore, bucket: str, in_process: Path, s3_rollout: Rollout, tmp_path: Path
):
    model = f"s3://{bucket}/{PREFIX}"
    options = {"model": model, "lake": str(tmp_path / "lake"), "batch_id": "mine"}
    batch = await prepare(options, RunOrigin.now())
    create_plan(batch.paths, batch.plan)
    weights = bytearray((CHECKPOINT / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    object_store.put(bucket, WEIGHTS, bytes(weights))
    line = s3_rollout.refused("run", "--batch-id", "mine")
    assert "'mine' was planned with another configuration" in line and "(model_digest: " in line
    assert 2 == len(visible(s3_rollout.home)), "each state of the model has a folder"


async def test_an_external_engine_needs_the_tokenizer_only(
    object_store: ObjectStore, bucket: str, s3_rollout: Rollout, tmp_path: Path
):
    engine = await start_embedded(None, log=tmp_path / "engine.log")
    try:
        options = ("--engine", "external", "--engine-url", engine.url, "--model", f"s3://{bucket}/{PREFIX}")
        await asyncio.to_thread(s3_rollout.succeeds, "run", "--dry-run", *options)
    finally:
        await asyncio.to_thread(engine.stop)
    (folder,) = visible(s3_rollout.home)
    assert (folder / "tokenizer.json").is_file() and not (folder / "model.safetensors").exists()
    assert 0 == object_store.reads(bucket, WEIGHTS)


def test_other_bad_input_is_refused_before_the_store_is_asked(
    object_store: ObjectStore, bucket: str, s3_rollout: Rollout, tmp_path: Path
):
    model = ("--model", f"s3://{bucket}/{PREFIX}")
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}], "rollout_id": 7})
    (tmp_path / "twice.jsonl").write_text(f"{row}\n{row}\n")
    (tmp_path / "once.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert "no agent 'nobody'" in s3_rollout.refused("run", "--prompts", "once.jsonl", "--agent", "nobody", *model)
    line = s3_rollout.refused("run", "--prompts", "twice.jsonl", "--n-samples-per-prompt", 1, *model)
    assert "both have rollout_id 7" in line
    assert "choose another --lake" in s3_rollout.refused("run", "--lake", "/proc/lake", *model)
    assert 0 == object_store.reads(bucket)


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_half_a_checkpoint(object_store: ObjectStore, bucket: str, in_process: Path, missing: str):
    object_store.delete(bucket, f"{PREFIX}/{missing}")
    with pytest.raises(BadCheckpoint, match=f"half a checkpoint: {missing} missing"):
        fetch_model(f"s3://{bucket}/{PREFIX}", in_process)
    assert [] == [path for path in in_process.glob("*") if path.is_dir()]


def test_a_shard_of_the_weights_is_missing_or_torn(object_store: ObjectStore, in_process: Path, tmp_path: Path):
    local, bucket = make_checkpoint(tmp_path / "local", shards=2), object_store.bucket()
    uri, shard = object_store.upload(local, bucket, "m"), "model-00002-of-00002.safetensors"
    whole = (local / shard).read_bytes()
    object_store.put(bucket, f"m/{shard}", whole[:-100])
    with pytest.raises(BadCheckpoint, match=f"{uri}/{shard}: not a whole safetensors file"):
        fetch_model(uri, in_process)
    object_store.delete(bucket, f"m/{shard}")
    with pytest.raises(BadCheckpoint, match=f"half a checkpoint: {shard} missing"):
        fetch_model(uri, in_process)
    assert [] == [path for path in in_process.glob("*") if path.is_dir()]
    object_store.put(bucket, f"m/{shard}", whole)
    object_store.put(bucket, "m/deeper/other.safetensors", b"left alone")
    folder = fetch_model(uri, in_process)
    assert {path.name for path in local.iterdir()} == {path.name for path in folder.iterdir()}
    (folder / shard).unlink()
    assert folder == fetch_model(uri, in_process) and whole == (folder / shard).read_bytes()


def test_what_the_engine_does_not_serve_costs_no_weights(object_store: ObjectStore, in_process: Path, tmp_path: Path):
    bucket = object_store.bucket()
    uri = object_store.upload(make_checkpoint(tmp_path / "local"), bucket, "m")
    config = json.loads((tmp_path / "local" / "config.json").read_bytes())
    object_store.put(bucket, "m/config.json", json.dumps({**config, "architectures": ["Other"]}).encode())
    with pytest.raises(BadCheckpoint, match=f"model {uri}/config.json: architecture Other"):
        fetch_model(uri, in_process)
    assert 0 == object_store.reads(bucket, "m/model.safetensors")


def test_a_store_that_has_nothing_or_says_no(
    object_store: ObjectStore, bucket: str, in_process: Path, s3_rollout: Rollout, monkeypatch: pytest.MonkeyPatch
):
    line = s3_rollout.refused("run", "--model", "s3://nowhere-at-all/model")
    assert "model s3://nowhere-at-all/model: no such bucket, prefix or object" in line
    for uri in (f"s3://{bucket}/nothing", f"s3://{bucket}/models"):
        with pytest.raises(BadCheckpoint, match=f"model {uri}: no"):
            fetch_model(uri, in_process)
    for uri in ("s3://", "s3://bucket//model", "s3://bucket/../model"):
        with pytest.raises(BadConfig, match="give a directory or s3://bucket/prefix"):
            fetch_model(uri, in_process)
    with object_store.wrong_keys():
        line = s3_rollout.refused("run", "--model", f"s3://{bucket}/{PREFIX}")
    assert "no rights to read it" in line and "AWS_ACCESS_KEY_ID" in line
    assert not in_process.exists()


def test_a_store_that_does_not_answer(s3_rollout: Rollout, bucket: str):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening
        s3_rollout.environment = aws_environment(f"http://127.0.0.1:{held.getsockname()[1]}")
        line = s3_rollout.refused("run", "--model", f"s3://{bucket}/{PREFIX}")
    assert f"model s3://{bucket}/{PREFIX} cannot be fetched: " in line and "AWS_ENDPOINT_URL" in line


def test_doctor_looks_at_a_fetched_model(object_store: ObjectStore, bucket: str, s3_rollout: Rollout, tmp_path: Path):
    found = json.loads(s3_rollout.succeeds("doctor", "--json", "--model", f"s3://{bucket}/{PREFIX}"))
    engine = [check["detail"] for check in found["checks"] if check["what"] == "engine"]
    assert str(tmp_path / "home" / "models") in engine[0] and 0 == found["counts"]["fail"]
    done = s3_rollout("doctor", "--json", "--model", f"s3://{bucket}/nothing")
    failed = {check["what"]: check["detail"] for check in json.loads(done.stdout)["checks"] if check["state"] == "fail"}
    assert 1 == done.returncode and {"model"} == set(failed)
    assert f"s3://{bucket}/nothing" in failed["model"]
