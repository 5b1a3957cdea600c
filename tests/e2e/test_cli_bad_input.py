"""Bad input through the real command: one line that says what to change, exit code 2, nothing started or written."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from command import Rollout

from rollout.batch.prepare import RunOrigin, prepare
from rollout.engine.tiny import CHECKPOINT
from rollout.lake.staging import create_plan

ROW = {"messages": [{"role": "user", "content": "2 + 2"}], "label": "4"}


@pytest.fixture
def rollout(tmp_path: Path) -> Rollout:
    work = tmp_path / "work"
    work.mkdir()
    return Rollout(home=tmp_path / "home", cwd=work)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path):
    yield
    assert not (tmp_path / "home").exists(), "a server was started"
    assert [] == [path for path in (tmp_path / "work").rglob("*") if "tables" in path.parts or "staging" in path.parts]


def prompts(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_unreadable_prompt_file(rollout: Rollout, tmp_path: Path):
    assert "missing.jsonl: cannot be read: No such file" in rollout.refused("run", "--prompts", "missing.jsonl")
    assert "cannot be read: Is a directory" in rollout.refused("run", "--prompts", tmp_path)


def test_an_empty_prompt_file(rollout: Rollout, tmp_path: Path):
    assert "no prompts in it" in rollout.refused("run", "--prompts", prompts(tmp_path))


def test_a_row_without_messages(rollout: Rollout, tmp_path: Path):
    path = prompts(tmp_path, ROW, {"label": "4"})
    assert f"{path}, line 2: messages is missing" == rollout.refused("run", "--prompts", path)


def test_a_row_with_an_unknown_key(rollout: Rollout, tmp_path: Path):
    path = prompts(tmp_path, {**ROW, "lable": "4"})
    assert f"{path}, line 1: unknown key 'lable'" in rollout.refused("run", "--prompts", path)


def test_two_rows_with_one_rollout_key(rollout: Rollout, tmp_path: Path):
    path = prompts(tmp_path, {**ROW, "rollout_id": 7}, ROW, {**ROW, "rollout_id": 7})
    line = rollout.refused("run", "--prompts", path, "--n-samples-per-prompt", 1)
    assert f"{path}, lines 1 and 3: both have rollout_id 7" == line


async def test_a_batch_id_that_was_planned_with_another_configuration(rollout: Rollout, tmp_path: Path):
    path, lake = prompts(tmp_path, ROW), tmp_path / "lake"
    batch = await prepare({"prompts": str(path), "lake": str(lake), "batch_id": "mine"}, RunOrigin.now())
    create_plan(batch.paths, batch.plan)
    line = rollout.refused("run", "--lake", lake, "--batch-id", "mine", "--seed", 3)
    assert "'mine' was planned with another configuration" in line and "(seed: 0 != 3)" in line
    assert f"config hash {batch.plan.config_hash} there" in line
    path.write_text(path.read_text() * 2)
    assert "(prompts_digest: " in rollout.refused("run", "--lake", lake, "--batch-id", "mine")
    assert [Path("staging/mine/plan.json")] == [p.relative_to(lake) for p in lake.rglob("*") if p.is_file()]


@pytest.mark.parametrize("lake", ["/proc/lake", "file/lake"])
def test_a_lake_path_that_is_not_writable(rollout: Rollout, lake: str):
    (rollout.cwd / "file").write_text("")
    assert "choose another --lake" in rollout.refused("run", "--lake", lake)


def test_an_unknown_agent(rollout: Rollout, tmp_path: Path):
    path = prompts(tmp_path, ROW)
    assert "no agent 'nobody' is installed" in rollout.refused("run", "--prompts", path, "--agent", "nobody")
    path = prompts(tmp_path, {**ROW, "agent": "nobody"})
    assert "no agent 'nobody' is installed" in rollout.refused("run", "--prompts", path)


@pytest.mark.parametrize("part", ["reward", "picker", "finisher"])
def test_an_unknown_part(rollout: Rollout, part: str):
    line = rollout.refused("run", f"--{part}", "nobody")
    assert part in line and "'nobody'" in line


def test_an_unknown_chat_format(rollout: Rollout):
    assert "'nobody'" in rollout.refused("run", "--renderer", "nobody")


def test_an_agent_that_needs_v2_on_v1(rollout: Rollout):
    line = rollout.refused("run", "--session-version", "v1")
    assert "agent 'branching' needs session version v2, the batch has v1" in line


def test_a_checkpoint_that_cannot_be_loaded(rollout: Rollout, tmp_path: Path):
    assert "no such directory" in rollout.refused("run", "--model", tmp_path / "nowhere")
    torn = tmp_path / "torn"
    shutil.copytree(CHECKPOINT, torn)
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors" in rollout.refused("run", "--model", torn)


def test_an_engine_that_does_not_answer(rollout: Rollout):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert url in rollout.refused("run", "--engine", "external", "--engine-url", url)


def test_a_prefect_server_that_does_not_answer(rollout: Rollout):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/api"
        rollout.environment = {"PREFECT_API_URL": url}
        done = rollout("run")
    assert 2 == done.returncode
    assert f"error: PREFECT_API_URL {url} does not answer" in done.stderr.splitlines()[-1]


def test_a_port_in_use(rollout: Rollout):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        serve = ["session", "serve", "--engine", "http://127.0.0.1:9", "--tokenizer", CHECKPOINT]
        assert f"port {port} on 127.0.0.1 is in use" in rollout.refused(*serve, "--port", port)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--n-samples-per-prompt", "0"], "n_samples_per_prompt: Input should be greater than or equal to 1"),
        (["--temperature", "warm"], "temperature: "),
        (["--batch-id", "Not Good"], "batch_id: "),
        (["--engine", "external"], "engine_url goes with engine=external"),
        (["--engine", "external", *("--engine-url", "http://a:1") * 2], "http://a:1 is given twice"),
        (["--no-such-option"], "No such option: --no-such-option"),
    ],
)
def test_an_option_out_of_bounds(rollout: Rollout, options: list[str], said: str):
    assert said in rollout.refused("run", *options)


def test_a_batch_that_there_is_not(rollout: Rollout):
    for command in ("show", "parity"):
        assert "no batch 'mine' in " in rollout.refused(command, "mine")
    (rollout.cwd / "file").write_text("")
    assert "is a file; choose another --lake" in rollout.refused("show", "--lake", "file/lake")
