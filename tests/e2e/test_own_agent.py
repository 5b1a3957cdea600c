"""The template for a user's own package: installed as pip does, found, and run to a published batch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "examples" / "own_agent"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A copy of the template and the folder that it is installed into; no package index is asked."""
    folder = tmp_path_factory.mktemp("user")
    copy, site = folder / "own_agent", folder / "site"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", site, copy], check=True)
    return copy, site


def test_the_template_is_found_and_published(installed, rollout):
    copy, site = installed
    rollout.environment = {"PYTHONPATH": str(site)}
    parts = {part["name"]: part for part in json.loads(rollout.succeeds("agents", "--json"))["parts"]}
    assert ("agent", "own-agent 0.1.0", None) == tuple(parts["careful"][key] for key in ("kind", "package", "problem"))
    assert ("reward", "own_agent.reward:score") == (parts["graded"]["kind"], parts["graded"]["target"])
    options = ["--agent", "careful", "--reward", "graded", "--reward-key", "right", "--batch-id", "own"]
    shown = rollout.succeeds("run", "--prompts", copy / "prompts.jsonl", *options)
    assert "published        own, version " in shown
    assert 4 <= len(json.loads(rollout.succeeds("show", "own", "--group", 0, "--json"))["samples"])


@pytest.mark.full
def test_the_templates_own_tests_pass(installed, rollout):
    copy, site = installed
    environment = {**os.environ, "PYTHONPATH": str(site), "ROLLOUT_HOME": str(rollout.home)}
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", copy]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout
