"""The batch flow as Prefect sees it: its parameter schema is locked, and what starts a run decides its name."""

from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.exceptions import ParameterTypeError

from flows.batch import rollout_batch
from flows.lane import parity_lane
from flows.maintain import maintain_lake
from flows.parity import cross_engine
from rollout.config import BatchConfig, refuse_relative
from rollout.errors import BadConfig
from tasks import plan as plan_tasks

SIMPLE = {"string", "integer", "number", "boolean", "null"}


def test_the_flow_has_its_name_and_keeps_no_results():
    assert ("rollout-batch", False) == (rollout_batch.name, rollout_batch.persist_result)


def test_the_generated_schema_is_flat_and_follows_the_model():
    schema = rollout_batch.parameters.model_dump()
    assert list(BatchConfig.model_fields) == list(schema["properties"])
    assert [] == schema["required"] and not schema["definitions"]
    for name, field in BatchConfig.model_fields.items():
        shown = schema["properties"][name]
        kinds = {part["type"] for part in shown.get("anyOf", [shown])}
        assert kinds <= SIMPLE and len(kinds - {"null"}) == 1, name
        assert (field.description, field.default) == (shown["description"], shown["default"]), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seed", {"type": "integer", "minimum": 0, "maximum": 2**53 - 1, "default": 0}),
        ("temperature", {"type": "number", "minimum": 0.0, "maximum": 10.0, "default": 1.0}),
        ("session_version", {"type": "string", "enum": ["v1", "v2"], "default": "v2"}),
        ("engine", {"type": "string", "enum": ["embedded", "sglang", "external"], "default": "embedded"}),
        ("engine_gpus", {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 4096}, {"type": "null"}]}),
        ("gpu_price_per_hour", {"anyOf": [{"type": "number", "minimum": 0.0, "maximum": 1e6}, {"type": "null"}]}),
        ("task_runner", {"type": "string", "enum": ["local", "ray"], "default": "local"}),
        ("shard_size", {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 32}),
        ("canary", {"type": "integer", "minimum": 0, "maximum": 1_000_000, "default": 0}),
        ("parity_min_equal", {"type": "number", "minimum": 0.0, "maximum": 1.0, "default": 0.95}),
        ("parity_live_fraction", {"type": "number", "minimum": 0.0, "maximum": 1.0, "default": 0.0}),
    ],
)
def test_bounds_and_choices_reach_the_form(name: str, expected: dict):
    shown = rollout_batch.parameters.model_dump()["properties"][name]
    assert expected == {key: shown[key] for key in expected}


def test_the_parameters_of_the_comparison_are_locked():
    schema = cross_engine.parameters.model_dump()
    assert ("rollout-cross-engine", False) == (cross_engine.name, cross_engine.persist_result)
    assert ["batch", "against"] == schema["required"] and not schema["definitions"]
    shown = schema["properties"]
    assert ["batch", "against", "lake", "rollouts", "concurrency"] == list(shown)
    assert all(one["description"] for one in shown.values())
    assert ("./lake", None, 1) == tuple(shown[name]["default"] for name in ("lake", "rollouts", "concurrency"))
    assert {"type": "integer", "minimum": 1, "maximum": 1_000_000_000} == shown["rollouts"]["anyOf"][0]
    assert (1, 4096) == (shown["concurrency"]["minimum"], shown["concurrency"]["maximum"])


RUN = SimpleNamespace(
    id=UUID("0197f3a1-0000-7000-8000-00000badcafe"),
    created=datetime(2026, 10, 25, 0, 31, tzinfo=UTC),
    deployment_id=None,
    auto_scheduled=False,
    expected_start_time=datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
)


class FlowRunOfATest:
    """Stands in for Prefect's context, which only a server can make; everything else is real."""

    def __init__(self, run):
        self.flow_run = run

    def get(self):
        return self


async def test_a_run_that_somebody_started_is_named_by_its_creation_and_id(monkeypatch):
    monkeypatch.setattr(plan_tasks, "FlowRunContext", FlowRunOfATest(RUN))
    origin = await plan_tasks.flow_run_origin()
    assert (RUN.created, RUN.id.hex, None, None) == (
        origin.created_at,
        origin.flow_run_id,
        origin.deployment,
        origin.slot,
    )


async def test_options_equal_to_their_default_count_as_not_given_where_nobody_knows_better(monkeypatch, tmp_path):
    seen, known_rows = {}, []

    async def prepare(given, origin, *, known, **_):
        seen.update(given)
        known_rows.append(known)
        return SimpleNamespace(config=BatchConfig(**given))

    monkeypatch.setattr(plan_tasks, "prepare", prepare)
    options = {**BatchConfig().model_dump(), "lake": str(tmp_path), "concurrency": 16}
    await plan_tasks.plan_batch.fn(options)
    assert {"lake": str(tmp_path)} == seen
    token = plan_tasks.given_names.set(frozenset({"lake", "concurrency"}))
    rows = plan_tasks.checked_rows.set(["checked already"])
    seen.clear()
    await plan_tasks.plan_batch.fn(options)
    plan_tasks.given_names.reset(token)
    plan_tasks.checked_rows.reset(rows)
    assert [(), ["checked already"]] == known_rows
    assert {"lake": str(tmp_path), "concurrency": 16} == seen


@pytest.mark.parametrize(
    ("command", "allowed", "passes"),
    [
        (None, "", True),
        ("sh x.sh", "", False),
        ("sh x.sh", "bash, sh", True),
        ("/bin/sh x.sh", "sh", False),
        ("'my agent' x", "my agent", True),
        ("sh2", "sh", False),
    ],
)
def test_a_form_starts_only_programs_that_the_worker_allows(monkeypatch, command, allowed, passes):
    monkeypatch.setenv(plan_tasks.ALLOWED_COMMANDS, allowed)
    if passes:
        plan_tasks.check_allowed_command(command)
        return
    with pytest.raises(BadConfig, match=f"ROLLOUT_ALLOWED_COMMANDS does not allow .*allowed: {allowed or 'none'}"):
        plan_tasks.check_allowed_command(command)


def test_the_parameters_of_lane_and_upkeep_are_locked():
    lane, upkeep = (flow.parameters.model_dump()["properties"] for flow in (parity_lane, maintain_lake))
    assert ["lake", "engine", "engine_recipe", "engine_url", "model", "concurrency"] == list(lane)
    assert ["lake", "keep_days", "dry_run"] == list(upkeep)
    assert ["embedded", "sglang", "external"] == lane["engine"]["enum"] and 1 == lane["concurrency"]["default"]
    assert (7, 1, 3650) == tuple(upkeep["keep_days"][name] for name in ("default", "minimum", "maximum"))
    assert all(one["description"] for one in (*lane.values(), *upkeep.values()))
    assert ("rollout-parity-lane", "rollout-maintain-lake") == (parity_lane.name, maintain_lake.name)


@pytest.mark.parametrize("path", ["lake", "./lake", "data/prompts.jsonl"])
def test_a_worker_refuses_a_path_that_hangs_on_its_folder(path: str):
    with pytest.raises(BadConfig, match=rf"prompts: '{path}' is relative, .*whole path"):
        refuse_relative(lake="/lake", prompts=path)


def test_a_worker_takes_whole_paths_and_uris():
    refuse_relative(lake="s3://bucket/lake", prompts="demo", model=None)
    refuse_relative(lake="file:///lake", prompts="~/prompts.jsonl", model="/models/one")


@pytest.mark.parametrize("flow", [rollout_batch, cross_engine, parity_lane, maintain_lake], ids=lambda flow: flow.name)
def test_prefect_checks_the_parameters_of_every_flow(flow):
    """It makes a model of the annotations, which must be known wherever the flow's body is wrapped."""
    shown = flow.parameters.model_dump()
    given = dict.fromkeys(shown["required"], "x") | {"lake": "/lake"}
    assert "/lake" == flow.validate_parameters(given)["lake"]
    with pytest.raises(ParameterTypeError):
        flow.validate_parameters({**given, "lake": ["no text"]})


@pytest.mark.parametrize("flow", [rollout_batch, cross_engine, parity_lane, maintain_lake], ids=lambda flow: flow.name)
def test_every_whole_number_of_a_form_fits_into_64_bits(flow):
    """G50: beyond them Prefect's server answers every poll with 500 (prefect#15031)."""
    for name, shown in flow.parameters.model_dump()["properties"].items():
        for part in shown.get("anyOf", [shown]):
            if part["type"] == "integer":
                assert -(2**63) <= part["minimum"] < part["maximum"] < 2**63, name
