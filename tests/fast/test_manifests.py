"""What infra/ ships for hosts, Kubernetes and containers, checked by the tools that will read it."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
UNIT = ROOT / "infra" / "systemd" / "rollout-worker.service"
ENVIRONMENT = ROOT / "infra" / "systemd" / "worker.env.example"
TEMPLATE = ROOT / "infra" / "kubernetes" / "base-job-template.json"
CONTAINERFILE = ROOT / "infra" / "Containerfile"
HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"


@pytest.fixture(scope="module")
def unit() -> dict[str, dict[str, list[str]]]:
    """Sections of the unit, each name with all its values."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return sections


def template_variables() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TEMPLATE.read_text())["variables"]
    return found


def test_the_unit_ends_the_flow_before_its_children(unit):
    service = unit["Service"]
    assert (["mixed"], ["always"]) == (service["KillMode"], service["Restart"])
    (stop,) = service["ExecStop"]
    assert "pkill --signal TERM --parent ${MAINPID}" in stop
    assert f"{HEARTBEAT}=30" in service["Environment"]


def test_every_variable_of_the_unit_is_in_the_example(unit):
    given = configparser.ConfigParser(interpolation=None, comment_prefixes="#", delimiters="=")
    given.read_string("[given]\n" + ENVIRONMENT.read_text())
    (start,) = unit["Service"]["ExecStart"]
    assert set(re.findall(r"\$\{(\w+)\}", start)) <= {name.upper() for name in given["given"]}


def test_every_placeholder_of_the_job_is_a_variable_that_is_described():
    variables = template_variables()["properties"]
    job = json.dumps(json.loads(TEMPLATE.read_text())["job_configuration"])
    assert set(re.findall(r"{{ (\w+) }}", job)) == set(variables)
    assert all(one["title"] and one["description"] for one in variables.values())
    assert "30" == variables["env"]["default"][HEARTBEAT]


@pytest.mark.parametrize("file", [UNIT, TEMPLATE, CONTAINERFILE, ROOT / "infra" / "compose.yaml"], ids=lambda f: f.name)
def test_nothing_calls_the_outside(file: Path):
    assert re.search(r'\bDO_NOT_TRACK"?[:=]\s*"?1\b', file.read_text())


def test_every_test_that_the_readme_names_is_there():
    named = re.findall(r"`((?:fast|e2e)/test_\w+\.py)`", (ROOT / "infra" / "README.md").read_text())
    assert named and not [name for name in named if not (TESTS / name).exists()]


def test_the_image_is_of_the_sglang_that_the_tests_run():
    (tag,) = re.findall(r"^ARG SGLANG_TAG=v(.+)-runtime$", CONTAINERFILE.read_text(), re.M)
    plugin = ROOT / "rollout" / "engine" / "sglang_cpu_plugin"
    assert re.search(rf"^sglang\S*=={re.escape(tag)}$", _requirements(plugin), re.M)


def test_the_image_is_given_what_it_copies_and_nothing_else():
    copied = {
        name for names in re.findall(r"^COPY (.+) \S+$", CONTAINERFILE.read_text(), re.M) for name in names.split()
    }
    lines = CONTAINERFILE.with_suffix(".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in lines if line.startswith("!")} and "*" in lines
    assert all((ROOT / name).exists() for name in copied)


def _requirements(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("*.txt"))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with tests/manifest-requirements.txt."""
    folder = tmp_path_factory.mktemp("tools")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", folder, "-r", TESTS / "manifest-requirements.txt"], check=True)
    return folder


@pytest.fixture
def render(tools: Path, tmp_path: Path):
    """Makes a flow run's job of the template and the values that a deployment gives."""

    def rendered(**values: object) -> dict[str, Any]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        done = subprocess.run(
            [sys.executable, TESTS / "job_rendering.py", TEMPLATE, json.dumps(values)],
            env={
                **kept,
                "PYTHONPATH": str(tools),
                "PREFECT_API_URL": "http://10.0.0.7:4200/api",
                "PREFECT_HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
        )
        assert 0 == done.returncode, done.stderr
        job: dict[str, Any] = json.loads(done.stdout)["job"]
        return job

    return rendered


@pytest.mark.full
def test_a_job_of_kubernetes_has_its_gpus_memory_and_disk(render):
    job = render(image="registry.example/rollout-lake:0.1.0", gpus=8, shared_memory="64Gi", env={"ROLLOUT_DEBUG": "1"})
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert 8 == container["resources"]["limits"]["nvidia.com/gpu"]
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert {"medium": "Memory", "sizeLimit": "64Gi"} == mounts["/dev/shm"]
    assert {"sizeLimit": "200Gi"} == mounts["/var/lib/rollout-lake"]
    assert pod["securityContext"]["runAsNonRoot"]
    given = {one["name"]: one["value"] for one in container["env"]}
    assert ("30", "1") == (given[HEARTBEAT], given["ROLLOUT_DEBUG"])


@pytest.mark.full
def test_an_evicted_job_is_scheduled_again_by_prefect_and_by_nobody_else(render):
    job = render(image="registry.example/rollout-lake:0.1.0")
    assert (0, "Never") == (job["spec"]["backoffLimit"], job["spec"]["template"]["spec"]["restartPolicy"])
    given = {one["name"]: one["value"] for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert "reschedule" == given["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"]


@pytest.mark.full
def test_the_container_definition_has_no_findings(tools: Path):
    done = subprocess.run([tools / "bin" / "hadolint", "--no-color", CONTAINERFILE], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stdout), done.stdout + done.stderr


@pytest.mark.full
def test_systemd_reads_the_unit_without_a_complaint(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        subprocess.run(["apt-get", "install", "--quiet", "--yes", "systemd"], check=True)
    installed = tmp_path / UNIT.name
    program = re.compile(r"^ExecStart=\S+", re.M)
    installed.write_text(program.sub(f"ExecStart={sys.executable}", UNIT.read_text()))
    done = subprocess.run(["systemd-analyze", "verify", installed], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)
