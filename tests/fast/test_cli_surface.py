"""The command's surface: what it imports, and its options locked, so that none changes by accident."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli import app
from flows.options import cli_parameters, flow_signature, given_options
from rollout.config import BatchConfig

COMMAND = Path(sys.executable).with_name("rollout")

RUN_OPTIONS = [
    "--prompts",
    "--lake",
    "--batch-id",
    "--n-samples-per-prompt",
    "--agent",
    "--agent-command",
    "--reward",
    "--reward-key",
    "--session-version",
    "--matcher",
    "--picker",
    "--finisher",
    "--control-text",
    "--temperature",
    "--top-p",
    "--top-k",
    "--max-new-tokens",
    "--sampling-bounds",
    "--seed",
    "--max-turns",
    "--max-seq-len",
    "--rollout-ids",
    "--enable-thinking/--no-enable-thinking",
    "--renderer",
    "--model",
    "--lora",
    "--routed-experts/--no-routed-experts",
    "--policy-version",
    "--update-weights",
    "--weight-version",
    "--engine",
    "--engine-recipe",
    "--engine-url",
    "--engine-gpus",
    "--gpu-price-per-hour",
    "--concurrency",
    "--task-runner",
    "--ray-address",
    "--ray-resources",
    "--ray-modules",
    "--shard-size",
    "--rollout-timeout-s",
    "--max-attempts",
    "--retry-agent-errors/--no-retry-agent-errors",
    "--max-failed-in-a-row",
    "--canary",
    "--skip-bad-prompts/--no-skip-bad-prompts",
    "--parity-min-equal",
    "--parity-live-fraction",
]


def test_the_options_of_run_are_locked():
    parameters = get_command(app).commands["run"].params
    assert [*RUN_OPTIONS, "--dry-run", "--json"] == ["/".join(p.opts + p.secondary_opts) for p in parameters]


def test_the_options_of_doctor_are_locked():
    parameters = get_command(app).commands["doctor"].params
    assert ["--engine-url", "--model", "--renderer", "--lake", "--json"] == [p.opts[0] for p in parameters]


def test_the_options_of_parity_are_locked():
    parameters = get_command(app).commands["parity"].params
    expected = ["batch", "--lake", "--limit", "--against", "--rollouts", "--concurrency", "--record", "--json"]
    assert expected == [p.opts[0] for p in parameters]


def test_the_options_of_up_and_trigger_are_locked():
    commands = get_command(app).commands
    assert ["--lake", "--port", "--json"] == [p.opts[0] for p in commands["up"].params]
    assert ["--deployment", "--param", "--watch", "--json"] == [p.opts[0] for p in commands["trigger"].params]


def test_every_field_of_the_configuration_is_an_option_and_a_flow_parameter():
    fields = list(BatchConfig.model_fields)
    assert fields == [parameter.name for parameter in cli_parameters()]
    assert fields == list(flow_signature().parameters)


def test_only_what_was_given_is_given():
    values = {"seed": "3", "reward": "none", "prompts": "none", "max_turns": None, "skip_bad_prompts": False}
    assert {"seed": "3", "reward": None, "prompts": "none", "skip_bad_prompts": False} == given_options(values)


def test_engines_may_be_given_once_for_each_or_with_commas():
    assert {"engine_url": "http://a:1,http://b:1"} == given_options({"engine_url": ["http://a:1", "http://b:1"]})
    assert {"engine_url": None} == given_options({"engine_url": ["none"]})
    assert {} == given_options({"engine_url": []})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--help"],
            ["run", "show", "parity", "agents", "doctor", "session", "Examples", "ROLLOUT_HOME", "PREFECT_API_URL"],
        ),
        (["run", "--help"], ["--n-samples-per-prompt", "Examples", "--dry-run", "[default: (0.95)]", "ROLLOUT_HOME"]),
        (["show", "--help"], ["--sample", "--group", "Examples", "ROLLOUT_HOME"]),
        (["doctor", "--help"], ["--engine-url", "--renderer", "Exit code 1", "Examples", "rollout doctor --json"]),
        (["parity", "--help"], ["differ", "--against", "--record", "Examples", "--json"]),
        (["session", "serve", "--help"], ["--engine", "--tokenizer", "--driver-token-env"]),
    ],
    ids=lambda value: "_".join(value).replace("-", "") if "--help" in value else "",
)
def test_help_names_what_there_is(arguments: list[str], expected: list[str]):
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=True)
    assert [] == [word for word in expected if word not in done.stdout]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["run", "--dry-run"],
        ["show"],
        ["show", "mine"],
        ["parity", "mine"],
        ["parity", "mine", "--against", "http://127.0.0.1:9"],
        ["agents"],
        ["doctor", "--help"],
        ["doctor", "--engine-url", "http://127.0.0.1:9"],
    ],
    ids=" ".join,
)
def test_commands_that_start_no_flow_import_neither_prefect_nor_torch(arguments: list[str], tmp_path: Path):
    code = (
        "import sys, atexit\n"
        "from rollout.__main__ import main\n"
        "atexit.register(lambda: print('heavy:', sorted({'prefect', 'torch', 'transformers'} & set(sys.modules))))\n"
        f"sys.argv = ['rollout', *{arguments!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "heavy: []" == done.stdout.splitlines()[-1]


def test_a_dry_run_writes_nothing(tmp_path: Path):
    arguments = ["run", "--dry-run", "--n-samples-per-prompt", "2"]
    done = subprocess.run([COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert ("64", "128") == (facts["prompts"], facts["rollouts"])
    assert 64 == len(facts["config_hash"])
    assert [] == list(tmp_path.iterdir())


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path):
    command = f"{COMMAND} run --dry-run --json | true"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert "" == done.stderr
