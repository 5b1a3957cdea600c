"""What a batch asks of Ray, read from its options; no cluster."""

import sys
from pathlib import Path

import pytest

from rollout import ray_options
from rollout.config import make_config
from rollout.errors import BadConfig
from rollout.ray_options import module_paths, parse_resources, remote_arguments, require_ray


def test_resources_become_the_arguments_of_a_ray_task():
    arguments = remote_arguments(parse_resources("CPU=4, GPU=0.5,H200=1"))
    assert {"num_cpus": 4.0, "num_gpus": 0.5, "resources": {"H200": 1.0}} == arguments


@pytest.mark.parametrize("text", ["", "H200", "=1", "H200=x", "H200=-1", "H200=inf", "H200=nan", "GPU=1,GPU=1"])
def test_other_resources_are_refused_by_name(text: str):
    with pytest.raises(BadConfig, match=r"ray_resources: Value error, .*(want|finite)"):
        make_config(ray_resources=text)


@pytest.mark.parametrize("text", ["", "a.b", "own-agent", "/srv/own_agent", "s3://b/own.whl"])
def test_modules_are_named_as_they_are_imported(text: str):
    with pytest.raises(BadConfig, match=r"ray_modules: Value error, .*without dots"):
        make_config(ray_modules=text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages: `mine`, with an agent, and the single file `alone`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "alone.py").touch()
    info = tmp_path / "mine_agents-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-agents\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollout.agents]\nmy_agent = mine.agents:run\n")
    (info / "RECORD").write_text("mine/__init__.py,,\nmine_agents-1.0.dist-info/entry_points.txt,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_goes_with_the_metadata_that_has_its_entry_points(site: Path):
    expected = [site / "mine", site / "alone.py", site / "mine_agents-1.0.dist-info"]
    assert expected == module_paths(["mine", "alone"])
    assert "mine" not in sys.modules, "named by whoever fills in a form, so found without importing it"


@pytest.mark.parametrize(("name", "said"), [("not_there_at_all", "no module"), ("sys", "no folder or file")])
def test_a_module_that_cannot_be_brought_is_refused(name: str, said: str):
    with pytest.raises(BadConfig, match=f"ray_modules: .*{said}|ray_modules: {name} is {said}"):
        module_paths([name])


@pytest.mark.parametrize(
    ("installed", "url", "modules", "said"),
    [
        (False, "http://prefect/api", [], r"pip install 'rollout-lake\[ray\]'"),
        (True, None, [], "set PREFECT_API_URL"),
        (True, "http://prefect/api", ["not_there_at_all"], "no module 'not_there_at_all'"),
    ],
)
def test_what_a_batch_on_ray_lacks_is_said_first(monkeypatch, installed: bool, url: str | None, modules, said: str):
    found = ray_options.find_spec
    known = {"prefect_ray": object() if installed else None}
    monkeypatch.setattr(ray_options, "find_spec", lambda name: known[name] if name in known else found(name))
    with pytest.raises(BadConfig, match=said):
        require_ray(url, modules)
