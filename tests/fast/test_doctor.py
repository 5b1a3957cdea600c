"""`rollout doctor`'s checks of what is on this machine: each thing that can be wrong is made wrong."""

import json
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command import COMMAND
from embedded_checkpoints import make_checkpoint
from installing import install
from lake_batch import plan_batch, publish, stage_all

from rollout.doctor.clock import judge_clock, judge_date
from rollout.doctor.finding import Finding
from rollout.doctor.lake import check_lake, check_rights
from rollout.doctor.packages import check_packages
from rollout.doctor.parts import check_parts
from rollout.doctor.space import check_space
from rollout.doctor.tokens import check_tokens
from rollout.engine.tiny import CHECKPOINT
from rollout.lake.paths import LakePaths
from rollout.lake.store import LocalStore


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state != "ok"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint's tokenizer and config, to be spoiled."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_checkpoint_without_the_control_strings_of_the_renderer(tmp_path: Path):
    findings, prompt = check_tokens(make_checkpoint(tmp_path / "small"), "qwen3")
    (found,) = findings
    assert prompt is None and ("fail", "special tokens") == (found.state, found.what)
    assert "<tool_call>" in found.detail and "choose the --renderer of this checkpoint's family" in found.detail


def test_a_control_string_that_is_several_ids(checkpoint: Path):
    path = checkpoint / "tokenizer.json"
    data = json.loads(path.read_text())
    (entry,) = (token for token in data["added_tokens"] if token["content"] == "<tool_call>")
    data["added_tokens"].remove(entry)
    data["model"]["vocab"]["<tool_call>"] = entry["id"]
    path.write_text(json.dumps(data))
    (found,), prompt = check_tokens(checkpoint, "qwen3")
    assert prompt is None and ("fail", "special tokens") == (found.state, found.what)
    assert "<tool_call>" in found.detail and "declare them in added_tokens" in found.detail


@pytest.mark.parametrize(("renderer", "what"), [("no_such_family", "renderer"), ("llama-3", "special tokens")])
def test_another_renderer(checkpoint: Path, renderer: str, what: str):
    (found,), prompt = check_tokens(checkpoint, renderer)
    assert prompt is None and ("fail", what) == (found.state, found.what) and "--renderer" in found.detail


def test_no_checkpoint_at_all(tmp_path: Path):
    (found,), prompt = check_tokens(tmp_path / "none", "qwen3")
    assert prompt is None and ("fail", "tokenizer") == (found.state, found.what)
    assert "give a model directory" in found.detail


def test_a_tokenizer_that_reads_the_prompt_otherwise(checkpoint: Path):
    """Its normalizer changes the text of a whole prompt, as it does that of each piece."""
    change(checkpoint / "tokenizer.json", normalizer={"type": "Prepend", "prepend": "x"})
    (found,) = problems(check_tokens(checkpoint, "qwen3")[0])
    assert ("fail", "prompt ids") == (found.state, found.what) and "choose another --renderer" in found.detail


def test_a_chat_template_that_writes_another_prompt(checkpoint: Path):
    template = json.loads((checkpoint / "tokenizer_config.json").read_text())["chat_template"]
    change(checkpoint / "tokenizer_config.json", chat_template=template.replace("# Tools", "# Their tools"))
    (found,) = problems(check_tokens(checkpoint, "qwen3")[0])
    assert ("warn", "prompt ids") == (found.state, found.what) and "is it the --renderer?" in found.detail


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ raise_exception('no tools here') }}", "no tools here"), ("{% if %}", "cannot be rendered")],
)
def test_a_chat_template_that_refuses(checkpoint: Path, template: str, words: str):
    (checkpoint / "chat_template.jinja").write_text(template)
    (found,) = problems(check_tokens(checkpoint, "qwen3")[0])
    assert ("warn", "prompt ids") == (found.state, found.what) and words in found.detail


@pytest.mark.parametrize("named", [False, True])
def test_chat_templates_wherever_they_stand(checkpoint: Path, named: bool):
    config = checkpoint / "tokenizer_config.json"
    template = json.loads(config.read_text())["chat_template"]
    if named:
        change(config, chat_template=[{"name": "default", "template": "x"}, {"name": "tool_use", "template": template}])
    else:
        change(config, chat_template=None)
        (checkpoint / "chat_template.jinja").write_text(template)
    findings, _ = check_tokens(checkpoint, "qwen3")
    assert [] == problems(findings) and "as the chat template writes them" in findings[1].detail


def test_a_checkpoint_without_a_chat_template(checkpoint: Path):
    (checkpoint / "tokenizer_config.json").unlink()
    findings, _ = check_tokens(checkpoint, "qwen3")
    assert [] == problems(findings) and "no chat template" in findings[1].detail


def test_a_model_that_does_not_know_all_ids(checkpoint: Path):
    change(checkpoint / "config.json", vocab_size=890)
    (found,) = problems(check_tokens(checkpoint, "qwen3")[0])
    assert ("fail", "vocabulary") == (found.state, found.what) and "give the --model" in found.detail


@pytest.mark.parametrize(
    ("required", "state", "words"),
    [
        ("polars>=99", "warn", "pip install 'polars>=99'"),
        ("no-such-package>=1", "fail", "is not installed; install it anew"),
    ],
)
def test_packages_outside_their_range(monkeypatch: pytest.MonkeyPatch, required: str, state: str, words: str):
    monkeypatch.setattr(metadata, "requires", lambda name: ["aiohttp>=3", required, 'mypy>=99; extra == "dev"'])
    (found,) = problems(check_packages())
    assert (state, "packages") == (found.state, found.what) and words in found.detail


def test_a_python_outside_the_range(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.10.14")
    (found,) = problems(check_packages())
    assert ("fail", "python") == (found.state, found.what) and "is outside >=3.11" in found.detail


def test_ours_is_imported_but_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout.doctor.packages.DISTRIBUTION", "no-such-package")
    (found,) = check_packages()
    assert "warn" == found.state and "not installed" in found.detail


def test_packages_as_they_are_installed_here():
    assert ["python", "packages"] == [finding.what for finding in check_packages() if finding.state == "ok"]


def test_a_part_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entries = {"rollout.rewards": {"broken": "missing_function"}}
    monkeypatch.syspath_prepend(install(tmp_path / "site", "doctor-broken-part", "print('noise')", entries))
    (found,) = problems(check_parts())
    assert ("fail", "parts") == (found.state, found.what)
    assert "broken" in found.detail and "repair or uninstall doctor-broken-part" in found.detail


@pytest.mark.parametrize(
    ("skew_s", "state"), [(0, "ok"), (-5, "ok"), (5.5, "warn"), (-59, "warn"), (61, "fail"), (-1e9, "fail")]
)
def test_clocks(skew_s: float, state: str):
    found = judge_clock("it", 1e9 + skew_s, 1e9)
    assert state == found.state and (state == "ok" or "set both by NTP" in found.detail)


@pytest.mark.parametrize("header", [None, "", "yesterday"])
def test_a_clock_that_cannot_be_read(header: str | None):
    assert "warn" == judge_date("it", header, 1e9).state


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - 1000, 1000))
    found = check_space("lake", tmp_path / "not" / "there")
    assert "warn" == found.state and "make room" in found.detail


def test_a_lake_that_is_not_there_yet_and_is_not_there_afterwards(tmp_path: Path):
    findings = check_lake(str(tmp_path / "new" / "lake"))
    assert ([], []) == (problems(findings), list(tmp_path.iterdir()))
    assert ["lake", "clock", "tables", "disk"] == [finding.what for finding in findings]


def test_a_lake_with_batches_is_left_as_it_is(tmp_path: Path):
    paths = LakePaths(tmp_path / "lake")
    publish(paths, plan_batch(), stage_all(paths, plan_batch()))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    findings = check_lake(paths.uri)
    assert [] == problems(findings) and "samples 1" in findings[2].detail
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("uri", ["file/lake", "http://host/lake", "lake[1]"])
def test_a_place_that_no_lake_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    (found,) = check_lake(uri)
    assert ("fail", "lake") == (found.state, found.what) and ["file"] == [path.name for path in tmp_path.iterdir()]


def test_a_foreign_delta_table(tmp_path: Path):
    pl.DataFrame({"a": [1]}).write_delta(str(tmp_path / "tables" / "samples"))
    (found,) = problems(check_lake(str(tmp_path)))
    assert ("fail", "tables") == (found.state, found.what)
    assert "is missing" in found.detail and "choose another --lake" in found.detail


def test_a_damaged_table(tmp_path: Path):
    pl.DataFrame({"a": [1]}).write_delta(str(tmp_path / "tables" / "samples"))
    for path in (tmp_path / "tables" / "samples" / "_delta_log").glob("*.json"):
        path.write_text("{")
    (found,) = problems(check_lake(str(tmp_path)))
    assert "fail" == found.state and "cannot be opened" in found.detail


class FaultyStore(LocalStore):
    """Injects the faults of stores that no lake may be on; `fault` names the one."""

    fault = ""

    def create(self, key: str, data: bytes) -> bool:
        if self.fault == "no right to write":
            raise PermissionError(13, "Permission denied", key)
        if self.fault == "the later writer wins":
            self.path(key).unlink(missing_ok=True)
        return super().create(key, data)

    def read(self, key: str) -> bytes:
        return b"" if self.fault == "other bytes" else super().read(key)

    def modified(self, key: str) -> float:
        return super().modified(key) + (-600 if self.fault == "another time" else 0)

    def exists(self, key: str) -> bool:
        return self.fault == "no right to delete" or super().exists(key)


@pytest.mark.parametrize(
    ("fault", "what", "words"),
    [
        ("no right to write", "lake", "Permission denied"),
        ("the later writer wins", "lake", "both win"),
        ("other bytes", "lake", "not what is read back"),
        ("another time", "clock", "behind this machine: set both by NTP"),
        ("no right to delete", "lake", "cannot be deleted"),
    ],
)
def test_a_store_that_no_lake_may_be_on(tmp_path: Path, fault: str, what: str, words: str):
    paths = LakePaths(tmp_path / "lake")
    paths.store = store = FaultyStore(tmp_path / "lake")
    store.fault = fault
    (found,) = problems(check_rights(paths))
    assert ("fail", what) == (found.state, found.what) and words in found.detail
    assert [] == list(tmp_path.iterdir())


def doctor(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "ROLLOUT_"))}
    environment = {**kept, "ROLLOUT_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    return subprocess.run(
        [COMMAND, "doctor", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )


def test_a_dead_engine_is_one_line_and_exit_code_1(tmp_path: Path):
    done = doctor(tmp_path, "--engine-url", "http://127.0.0.1:9")
    lines = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert (1, 1, "") == (done.returncode, len(lines), done.stderr)
    assert "start the engine, or correct --engine-url" in lines[0]
    assert [] == list(tmp_path.iterdir())


def test_options_that_no_batch_could_have(tmp_path: Path):
    done = doctor(tmp_path, "--renderer", "no_such_family", "--engine-url", "http://127.0.0.1:9", "--json")
    found = json.loads(done.stdout)
    failed = [check["what"] for check in found["checks"] if check["state"] == "fail"]
    assert (1, ["renderer", "engine"], 2) == (done.returncode, failed, found["counts"]["fail"])
