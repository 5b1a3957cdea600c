import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import __version__
from rollout.batch import plan as planning
from rollout.batch.plan import (
    Plan,
    config_hash,
    derived_batch_id,
    make_batch_id,
    make_plan,
    shard_inputs,
    shard_refusals,
)
from rollout.batch.prompts import parse_prompts
from rollout.config import BATCH_ID_PATTERN, IDENTITY_OPTIONS, MAX_SHARDS, make_config
from rollout.errors import BadConfig, BadPrompts

NOW = datetime(2026, 12, 2, 8, 30, tzinfo=UTC)
RUN = "01890f5e-5b2c-7cc0-98c5-aabbccddeeff"


def line(**extra):
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **extra})


def plan(lines, *, skip_bad=False, created_at=NOW, deployment=None, slot=None, **options):
    data = "\n".join(lines).encode()
    return make_plan(
        make_config(prompts="p.jsonl", skip_bad_prompts=skip_bad, **options),
        rows=parse_prompts(data, "p.jsonl", skip_bad=skip_bad),
        model_digest="m",
        created_at=created_at,
        flow_run_id=RUN,
        deployment=deployment,
        slot=slot,
    )


def inputs(lines, **options):
    made = plan(lines, **options)
    rows = parse_prompts("\n".join(lines).encode(), "p.jsonl", skip_bad=True)
    return [given for cut in made.shards for given in shard_inputs(made, rows, cut.shard)]


# Indexes, groups, shards


def test_index_is_group_times_samples_plus_position():
    found = inputs([line()] * 3, n_samples_per_prompt=4, shard_size=8)
    assert list(range(12)) == [given.index for given in found]
    assert [k // 4 for k in range(12)] == [given.group_index for given in found]


@given(
    n_prompts=st.integers(1, 400),
    n_samples=st.integers(1, 6),
    shard_size=st.integers(1, 60),
    limit=st.integers(1, 50),
    canary=st.integers(0, 40),
)
def test_shards_are_whole_groups_cover_every_index_once_and_are_not_too_many(
    n_prompts, n_samples, shard_size, limit, canary
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MAX_SHARDS", limit)
        cuts = planning._cut_shards(n_prompts, n_samples, shard_size, canary)
        plain = planning._cut_shards(n_prompts, n_samples, shard_size)
    apart = 0 < canary < n_prompts
    assert list(range(n_prompts * n_samples)) == [index for cut in cuts for index in cut.indexes]
    assert list(range(len(cuts))) == [cut.shard for cut in cuts]
    assert len(cuts) <= max(limit, 1 + apart)
    for cut in cuts:
        assert cut.first_index == cut.first_group * n_samples and len(cut.indexes) == cut.n_groups * n_samples
        needed = -(-n_prompts // max(1, limit - apart))
        assert cut.n_groups <= max(1, shard_size // n_samples, needed)
    if apart:
        assert canary in {cut.first_group for cut in cuts}, "a canary's group shares a shard with others"
    else:
        assert plain == cuts


def test_a_large_batch_gets_larger_shards_not_more():
    made = plan([line()] * 2500, n_samples_per_prompt=1, shard_size=1)
    assert MAX_SHARDS >= len(made.shards)
    assert 2500 == made.n_rollouts == sum(cut.n_rollouts for cut in made.shards)


def test_members_of_a_group_share_nothing_that_an_agent_could_change():
    first, second = inputs([line(metadata={"a": [1]})], n_samples_per_prompt=2)
    first.messages[0]["content"] = "changed"
    first.metadata["a"].append(2)
    assert ("hi", {"a": [1]}) == (second.messages[0]["content"], second.metadata)


def test_rows_name_their_agent_or_take_the_batchs():
    made = plan([line(agent="branching"), line(), line()], agent="single_turn")
    assert ("branching", "single_turn") == made.agents
    found = inputs([line(agent="branching"), line()], agent="single_turn", n_samples_per_prompt=1)
    assert ["branching", "single_turn"] == [given.agent for given in found]


def test_a_refused_row_keeps_its_place_and_is_recorded():
    """G25: 999 run, one is recorded as failed."""
    lines = [line()] * 999
    lines.insert(500, json.dumps({"label": "x"}))
    made = plan(lines, skip_bad=True, n_samples_per_prompt=1, shard_size=1000)
    rows = parse_prompts("\n".join(lines).encode(), "p.jsonl", skip_bad=True)
    assert (1000, 1, 1000) == (made.n_prompts, made.n_refused, made.n_rollouts)
    run = shard_inputs(made, rows, 0)
    assert 999 == len(run) and 500 not in [given.index for given in run]
    ((given, failure),) = shard_refusals(made, rows, 0)
    assert (500, 500, []) == (given.index, given.group_index, given.messages)
    assert ("bad_prompt", "line 501: messages is missing") == (failure.type, failure.message)


def test_rows_of_another_file_are_refused():
    made = plan([line()] * 3)
    with pytest.raises(ValueError, match="2 prompt rows for a plan of 3"):
        shard_inputs(made, parse_prompts(f"{line()}\n{line()}".encode(), "p"), 0)


def test_a_repeated_prompt_keeps_its_multiplicity():
    """G18: the same prompt three times is three groups."""
    assert [0, 1, 2] == [given.group_index for given in inputs([line()] * 3, n_samples_per_prompt=1)]


# Rollout ids and keys


def test_rollout_ids_stay_none_or_become_the_index():
    assert [None, None] == [given.rollout_id for given in inputs([line()], n_samples_per_prompt=2)]
    found = inputs([line()], n_samples_per_prompt=2, rollout_ids="index")
    assert [0, 1] == [given.rollout_id for given in found]


def test_a_rows_own_rollout_id_is_kept_zero_too():
    """G12."""
    found = inputs([line(rollout_id=7), line(rollout_id=0)], n_samples_per_prompt=1)
    assert [7, 0] == [given.rollout_id for given in found]
    found = inputs([line(rollout_id=7), line()], n_samples_per_prompt=1, rollout_ids="index")
    assert [7, 1] == [given.rollout_id for given in found]


def test_a_rows_own_rollout_id_needs_one_sample_per_prompt():
    with pytest.raises(BadPrompts, match=r"p\.jsonl, line 2: its own rollout_id 9 needs n_samples_per_prompt 1, not 2"):
        plan([line(), line(rollout_id=9)], n_samples_per_prompt=2)


def test_two_rows_with_one_rollout_id_are_refused_and_both_named():
    with pytest.raises(BadPrompts, match="lines 1 and 3: both have rollout_id 5"):
        plan([line(rollout_id=5), line(), line(rollout_id=5)], n_samples_per_prompt=1)


@pytest.mark.parametrize("rollout_ids", ["none", "index"])
def test_a_rollout_id_that_is_another_rows_index_is_refused_and_both_named(rollout_ids):
    with pytest.raises(BadPrompts, match="lines 1 and 3: rollout_id 2 of line 1 is the index"):
        plan([line(rollout_id=2), line(), line()], n_samples_per_prompt=1, rollout_ids=rollout_ids)


def test_swapped_and_own_indexes_do_not_collide():
    plan([line(rollout_id=1), line(rollout_id=0)], n_samples_per_prompt=1)
    plan([line(rollout_id=0), line()], n_samples_per_prompt=1)


@given(
    ids=st.lists(st.none() | st.integers(0, 6), min_size=1, max_size=6), branched=st.lists(st.booleans(), min_size=6)
)
def test_accepted_rows_never_share_a_key_whatever_branches(ids, branched):
    lines = [line() if given is None else line(rollout_id=given) for given in ids]
    keys = [given if given is not None else index for index, given in enumerate(ids)]
    if len(set(keys)) == len(keys):
        plan(lines, n_samples_per_prompt=1)
    else:
        with pytest.raises(BadPrompts, match="lines"):
            plan(lines, n_samples_per_prompt=1)


# Config hash


def test_the_config_hash_changes_with_what_decides_rows_and_with_nothing_else():
    base = make_config()
    first = config_hash(base, b"p", "m")
    assert 64 == len(first)
    changes = {
        "skip_bad_prompts": True,
        "n_samples_per_prompt": 3,
        "agent": "x",
        "agent_command": "x",
        "reward": None,
        "reward_key": "k",
        "session_version": "v1",
        "matcher": "strict",
        "picker": "x",
        "finisher": "x",
        "control_text": "plain",
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "max_new_tokens": 7,
        "sampling_bounds": "temperature=0:1",
        "seed": 1,
        "max_turns": 3,
        "max_seq_len": 100,
        "rollout_ids": "index",
        "enable_thinking": True,
        "renderer": "x",
        "lora": "x",
        "routed_experts": True,
    }
    assert set(IDENTITY_OPTIONS) == set(changes)
    hashes = {config_hash(base.model_copy(update={name: value}), b"p", "m") for name, value in changes.items()}
    assert len(changes) == len(hashes - {first})
    assert first not in {config_hash(base, b"q", "m"), config_hash(base, b"p", "n")}
    others = {
        "lake": "x",
        "shard_size": 1,
        "concurrency": 1,
        "rollout_timeout_s": 1.0,
        "max_attempts": 1,
        "prompts": "x",
    }
    assert first == config_hash(base.model_copy(update=others), b"p", "m")


def test_the_config_hash_changes_with_the_package_version(monkeypatch):
    first = config_hash(make_config(), b"p", "m")
    monkeypatch.setattr(planning, "__version__", __version__ + ".x")
    assert first != config_hash(make_config(), b"p", "m")


def test_a_plan_survives_json():
    made = plan([line()] * 5, slot=datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")), deployment="n")
    assert made == Plan.from_bytes(made.to_bytes())
    assert made.config["n_samples_per_prompt"] == 4 and made.package_version == __version__


# Batch ids


def test_a_given_batch_id_wins():
    assert "mine" == plan([line()], batch_id="mine", deployment="nightly", slot=NOW).batch_id


def test_a_scheduled_batch_is_named_by_deployment_and_slot():
    berlin = ZoneInfo("Europe/Berlin")
    summer = datetime(2026, 10, 25, 2, 30, tzinfo=berlin)
    assert "nightly-20261025t0230p0200" == make_batch_id("Nightly", summer, NOW, RUN)
    assert "nightly-20261025t0230p0100" == make_batch_id("nightly", summer.replace(fold=1), NOW, RUN), "G28"
    west = datetime(2026, 1, 1, 23, 5, tzinfo=timezone(timedelta(hours=-3, minutes=-30)))
    assert "a-b-c-20260101t2305m0330" == make_batch_id("A b/c", west, NOW, RUN)


def test_the_run_date_is_the_slots_local_day():
    west = datetime(2026, 1, 1, 23, 5, tzinfo=timezone(timedelta(hours=-3)))
    assert date(2026, 1, 1) == plan([line()], deployment="n", slot=west).run_date
    assert date(2026, 1, 2) == plan([line()], created_at=west).run_date


def test_any_other_batch_is_named_by_its_flow_runs_creation_and_id():
    created = datetime(2026, 12, 2, 10, 30, 5, 999, tzinfo=timezone(timedelta(hours=2)))
    assert "20261202t083005-ccddeeff" == make_batch_id(None, None, created, RUN)
    assert make_batch_id(None, None, created, RUN) == make_batch_id(None, None, created, RUN.replace("-", "").upper())


@given(name=st.text(max_size=200))
def test_every_derived_id_is_within_the_pattern(name):
    made = make_batch_id(name, NOW, NOW, RUN)
    assert BATCH_ID_PATTERN.fullmatch(made)
    repick = derived_batch_id(made, "repick", "0123456789abcdef")
    assert BATCH_ID_PATTERN.fullmatch(repick) and repick.endswith(".repick-01234567")


def test_long_deployments_keep_apart():
    assert make_batch_id("a" * 90, NOW, NOW, RUN) != make_batch_id("a" * 91, NOW, NOW, RUN)


def test_naive_times_and_bad_ids_are_refused():
    naive = datetime(2026, 1, 1)
    for times in ({"created_at": naive}, {"slot": naive, "deployment": "d"}):
        for batch_id in (None, "given"):
            with pytest.raises(ValueError, match="timezone"):
                plan([line()], batch_id=batch_id, **times)
    with pytest.raises(BadConfig, match=r"batch_id: .*does not match"):
        plan([line()], batch_id="x y")


def test_the_members_of_a_plan_cannot_be_changed():
    made = plan([line()])
    with pytest.raises(AttributeError):
        made.batch_id = "x"
    assert replace(made, batch_id="y").batch_id == "y"
