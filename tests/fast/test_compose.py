"""`infra/compose.yaml` and the chart's values: valid, of one mind, on the installed Prefect, with no secret in them."""

import re
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import yaml
from postgres import COMPOSE, compose_services

VALUES = COMPOSE.parent / "helm" / "prefect-server-values.yaml"
SECRET = {
    "PREFECT_API_DATABASE_CONNECTION_URL",
    "PREFECT_REDIS_MESSAGING_URL",
    "PREFECT_REDIS_WORKER_CLEANUP_QUEUE_URL",
    "PREFECT_SERVER_DOCKET_URL",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_API_AUTH_STRING",
}
"""Settings that the chart's pods get from a Secret."""


def values() -> dict[str, Any]:
    return yaml.safe_load(VALUES.read_text())


def test_the_compose_file_is_what_compose_reads():
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_both_run_the_prefect_that_is_installed_here():
    tag = f"{version('prefect')}-python3.11"
    services = compose_services()
    assert {f"prefecthq/prefect:{tag}"} == {services[name]["image"] for name in ("server", "services")}
    assert tag == values()["global"]["prefect"]["image"]["prefectTag"]


def test_both_give_a_server_the_same_settings():
    given = values()
    chart = {one["name"]: one["value"] for one in given["global"]["prefect"]["env"] + given["server"]["env"]}
    chart["PREFECT_UI_API_URL"] = given["server"]["uiConfig"]["prefectUiApiUrl"]
    compose = compose_services()["server"]["environment"]
    assert {name: value for name, value in compose.items() if name not in SECRET} == chart
    messaging = given["backgroundServices"]["messaging"]
    assert compose["PREFECT_MESSAGING_BROKER"] == messaging["broker"]
    assert compose["PREFECT_MESSAGING_CACHE"] == messaging["cache"]


def test_passwords_are_asked_for():
    text = COMPOSE.read_text()
    for name in ("POSTGRES_PASSWORD", "PREFECT_AUTH"):
        assert set(re.findall(rf"\${{{name}(..)", text)) == {":?"}, f"{name} must have no default"
    given = values()
    assert not given["secret"]["create"] and given["secret"]["name"]
    assert given["server"]["basicAuth"]["enabled"] and given["server"]["basicAuth"]["existingSecret"]
    assert given["server"]["extraEnvVarsSecret"] == given["backgroundServices"]["extraEnvVarsSecret"]
