"""Verdicts on real sessions: what is equal, equal by path, not comparable, and every bit that differs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from scripted import START, TOOLS, Conversation, call, tables, tiny_tito, user

from rollout.columns import table_to_samples
from rollout.errors import Failure, ParityFailed, SessionRefused
from rollout.outcome import RolloutInput
from rollout.parity import verdict as verdict_module
from rollout.parity.validate import read_tape, require_parity, summarize, validate_tables
from rollout.parity.verdict import judge
from rollout.tito.renderer import Tito

VERSIONS = ("v1", "v2")


@pytest.fixture(scope="module")
def tito() -> Tito:
    return tiny_tito()


def validate(tito: Tito, samples: pa.Table, trajectories: pa.Table, indexes: tuple[int, ...] | None = None) -> pa.Table:
    return validate_tables(
        samples, trajectories, tito, batch_id="b", engine="scripted", created_at=START, indexes=indexes
    )


def verdict_of(tito: Tito, talk: Conversation, **outcome: Any) -> dict[str, Any]:
    """The parity row of one rollout, staged and read back."""
    (row,) = validate(tito, *tables(talk.result(talk.outcome(**outcome)))).to_pylist()
    return row


def short(row: dict[str, Any]) -> tuple[str, str | None, list[str]]:
    reason = row["reason"]
    return row["verdict"], reason if reason is None else reason.split(":")[0], row["paths"]


def singleton(tito: Tito, version: str) -> Conversation:
    talk = Conversation(tito, version)
    talk.ask(user("look"), text=call("Beijing"), tools=TOOLS)
    (asked,) = talk.history[-1]["tool_calls"]
    talk.ask({"role": "tool", "tool_call_id": asked["id"], "content": "12"}, text="It is 12.", tools=TOOLS)
    talk.ask(user("sure?"), text="yes")
    return talk


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rollout_id", [None, 0, 41])
def test_a_singleton_is_equal_whatever_its_rollout_id(tito, version, rollout_id):
    given = RolloutInput(index=7, group_index=1, rollout_id=rollout_id, messages=[user("go")])
    row = verdict_of(tito, singleton(tito, version), input=given)
    assert ("equal", None, []) == short(row)
    assert (7 if rollout_id is None else rollout_id) == row["rollout_key"]
    assert {"v1": "v1/v2", "v2": "v2/v1"}[version] == row["versions"]
    assert 0 < row["seconds"] < 60 and row["check"] == "replay" and row["engine_a"] == "scripted"


@pytest.mark.parametrize("version", VERSIONS)
def test_three_leaves_of_which_one_is_kept_are_equal(tito, version):
    talk = singleton(tito, version)
    before = talk.history
    talk.ask({"role": "system", "content": "be brief"}, text="first")
    for text in ("second", "third"):
        talk.history = before
        talk.ask({"role": "system", "content": "be brief"}, text=text)
    talk.ask({"role": "assistant", "content": "I said"}, user("again"), text="done")
    result = talk.result()
    assert 1 == len(result.samples) and 7 == len(result.tape.exchanges)
    assert ("equal", None, []) == short(verdict_of(tito, talk))


def branched(tito: Tito) -> Conversation:
    """One prefix, two branches of two turns each: two kept leaves."""
    talk = singleton(tito, "v2")
    fork = talk.history
    talk.ask(user("one"), text="1")
    talk.ask(user("more"), text="11")
    talk.history = fork
    talk.ask(user("two"), text="2")
    talk.ask(user("more"), text="22")
    return talk


def test_branches_are_equal_by_path(tito):
    result = branched(tito).result()
    assert [7, 7] == [sample.rollout_id for sample in result.samples]
    assert 0 in result.samples[0].loss_mask_R[:2].tolist()  # the prefix trains in the other sample
    row = verdict_of(tito, branched(tito))
    assert ("equal_by_path", "several samples", []) == short(row)


@pytest.mark.parametrize("version", VERSIONS)
def test_g34_a_first_turn_sent_again_is_equal_by_path(tito, version):
    talk = Conversation(tito, version)
    talk.ask(user("a"), text="x")
    talk.history = []
    talk.ask(user("a"), text="y")
    talk.ask(user("b"), text="z")
    assert ("equal_by_path", "several samples", []) == short(verdict_of(tito, talk))


def test_g05_compaction_is_equal_by_path_and_v1_is_unharmed(tito):
    talks = {version: Conversation(tito, version) for version in VERSIONS}
    for talk in talks.values():
        for number in range(12):
            talk.ask(user(f"step {number}"), text=f"done {number}")
    summary = [{"role": "system", "content": "compact"}, user("so far: 12 steps")]
    with pytest.raises(SessionRefused) as refusal:
        talks["v1"].begin(summary)
    assert 400 == refusal.value.status
    talks["v1"].ask(user("on"), text="fine")
    assert ("equal", None, []) == short(verdict_of(tito, talks["v1"]))
    talk = talks["v2"]
    talk.history = []
    talk.ask(*summary, text="good")
    talk.ask(user("on"), text="fine")
    assert [7, 7] == [sample.rollout_id for sample in talk.result().samples]
    assert ("equal_by_path", "several samples", []) == short(verdict_of(tito, talk))


def test_g10_a_chain_that_goes_on_behind_a_cut_turn_is_not_comparable(tito):
    talk = Conversation(tito, "v1")
    talk.ask(user("a"), text="x")
    talk.ask(user("b"), text="cut he", finish="length")
    talk.ask(user("c"), text="z")
    assert "truncated" == talk.result().samples[0].status
    assert ("not_comparable", "truncated_extension", []) == short(verdict_of(tito, talk))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cut_at_the_end_is_equal(tito, version):
    talk = Conversation(tito, version)
    talk.ask(user("a"), text="x")
    talk.ask(user("b"), text="cut he", finish="length")
    assert ("equal", None, []) == short(verdict_of(tito, talk))


@pytest.mark.parametrize("version", VERSIONS)
def test_samples_cut_at_max_seq_len_are_equal(tito, version):
    statuses = set()
    for max_seq_len in range(24, 66, 3):
        talk = Conversation(tito, version, max_seq_len=max_seq_len)
        try:
            for _ in range(9):
                talk.ask(user("go on"), text="three four five")
        except SessionRefused as refusal:
            assert "context_length_exceeded" == refusal.code
        (sample,) = talk.result().samples
        assert len(sample.tokens_T) <= max_seq_len
        statuses.add(str(sample.status))
        assert ("equal", None, []) == short(verdict_of(tito, talk))
    assert {"truncated", "completed"} == statuses


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rollout_without_a_sample_is_not_comparable(tito, version):
    assert ("not_comparable", "no_sample", []) == short(verdict_of(tito, Conversation(tito, version)))
    failed = Failure(type="engine_error", message="gone")
    row = verdict_of(tito, Conversation(tito, version), failure=failed, reward=None)
    assert ("not_comparable", "no_sample", []) == short(row)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_failed_rollouts_samples_are_judged_like_any(tito, version):
    talk = singleton(tito, version)
    failed = Failure(type="agent_error", message="boom")
    (sample,) = talk.result(talk.outcome(failure=failed)).samples
    assert sample.remove_sample and sample.reward is None
    assert ("equal", None, []) == short(verdict_of(tito, talk, failure=failed))


def test_judge_takes_samples_too(tito):
    talk = branched(tito)
    samples, trajectories = tables(talk.result())
    tape, outcome = read_tape(trajectories)
    staged = table_to_samples(samples)
    assert "equal_by_path" == judge(tape, outcome, staged, tito).verdict
    staged[1].rollout_id = 0
    assert ["sample[1].rollout_id: 0 != 7"] == judge(tape, outcome, staged, tito).paths
    assert ["samples: 1 != 2"] == judge(tape, outcome, staged[:1], tito).paths


def changed(table: pa.Table, column: str, change: Callable[[Any], Any], row: int = 0) -> pa.Table:
    """The table with one value changed, everything else the same bits."""
    values = table.column(column).to_pylist()
    values[row] = change(values[row])
    place = table.schema.get_field_index(column)
    field = table.schema.field(place)
    return table.set_column(place, field, pa.array(values, field.type))


def flip(value: float) -> float:
    (number,) = struct.unpack("<Q", struct.pack("<d", value))
    return struct.unpack("<d", struct.pack("<Q", number ^ 1))[0]


def at(place: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [*values[:place], change(values[place]), *values[place + 1 :]]


def in_json(key: str, value: Any) -> Callable[[str], str]:
    return lambda text: orjson.dumps({**orjson.loads(text), key: value}).decode()


FLIPS = [
    ("rollout_log_probs", at(17, flip), "sample.rollout_log_probs[17]: 0x"),
    ("tokens", at(17, lambda token: token ^ 1), "sample.tokens[17]: "),
    ("loss_mask", at(17, lambda bit: bit ^ 1), "sample.loss_mask[17]: "),
    ("rollout_id", lambda value: 0, "sample.rollout_id: 0 != None"),
    ("rollout_key", lambda value: 0, "sample.rollout_key: 0 != 7"),
    ("metadata", in_json("foo", 2), "sample.metadata.foo: 2 != 1"),
    ("metadata", in_json("new", 2), "sample.metadata.new: 2 != <absent>"),
    ("metadata", in_json("tool_time", 1), "sample.metadata.tool_time: 1 != 0x3fe0000000000000 (0.5)"),
    ("metadata", in_json("leaf", {}), "sample.metadata.leaf."),
    ("reward", lambda value: None, "sample.reward: None != 0x3ff0000000000000 (1.0)"),
    ("status", lambda value: "truncated", "sample.status: 'truncated' != 'completed'"),
    ("response", lambda value: value + "x", "sample.response: "),
    ("label", lambda value: "5", "sample.label: '5' != '4'"),
    ("prompt", lambda value: '[{"role":"user","content":"went"}]', "sample.prompt[0].content: 'went' != 'go'"),
    ("cached_tokens", lambda value: value + 1, "sample.cached_tokens: "),
    ("prompt_tokens", lambda value: value + 1, "sample.prompt_tokens: "),
    ("weight_versions", at(0, lambda value: "w9"), "sample.weight_versions[0]: 'w9' != 'w1'"),
    ("weight_spans", at(0, lambda span: {**span, "version": "w9"}), "sample.weight_spans[0].version: 'w9' != 'w0'"),
    ("attempt", lambda value: 1, "sample.attempt: 1 != 0"),
    ("turns", lambda value: 9, "sample.turns: 9 != 3"),
    ("session_version", lambda value: "v1", "sample.session_version: 'v1' != 'v2'"),
    ("failure", lambda value: {"type": "deadline", "message": ""}, "sample.failure: "),
    ("temperature", flip, "sample.temperature: 0x"),
]


@pytest.mark.parametrize(("column", "change", "path"), FLIPS)
def test_one_changed_value_is_exactly_one_path(tito, column, change, path):
    samples, trajectories = tables(singleton(tito, "v2").result())
    bad = changed(samples, column, change)
    (row,) = validate(tito, bad, trajectories).to_pylist()
    assert ("differs", "own replay") == (row["verdict"], row["reason"])
    found = [name for name in row["paths"] if name.startswith(path)]
    assert row["paths"] == found
    assert column == "metadata" or 1 == len(found)
    with pytest.raises(ParityFailed) as failed:
        require_parity(validate(tito, bad, trajectories), min_equal=0.0)
    assert f"1 of 1 rollouts differ: rollout 7: {row['paths'][0]}" in str(failed.value)


def test_a_stale_digest_differs_without_a_path(tito):
    samples, trajectories = tables(singleton(tito, "v2").result())
    bad = changed(samples, "payload_digest", lambda digest: bytes(32))
    assert ("differs", "digest", []) == short(validate(tito, bad, trajectories).to_pylist()[0])
    with pytest.raises(ParityFailed, match="rollout 7: digest: payload_digest is not that of the row"):
        require_parity(validate(tito, bad, trajectories), min_equal=0.0)


TAPE_FLIPS = [
    ("output_log_probs", at(0, flip), "own replay", "sample.rollout_log_probs["),
    ("appended_ids", at(0, lambda token: token ^ 1), "own replay", "exchange[1].prompt_ids["),
    ("appended_messages", lambda text: text.replace("12", "13"), "own replay", "exchange[1].prompt_ids["),
    ("finish", lambda finish: "length", "own replay", "exchange[2]: v2 answers 409: truncated generation"),
    ("engine_seconds", lambda seconds: 0.5, "own replay", "sample.metadata.lifecycle[1].t0: "),
    ("seq", lambda seq: 9, "broken", None),
    ("attempt", lambda attempt: 1, "broken", None),
    ("parent", lambda parent: 1, "broken", None),  # row 2 is exchange 1: a circle
    ("parent", lambda parent: -1, "broken", None),
    ("parent", lambda parent: None, "own replay", "exchange[1]"),
    ("batch_id", lambda batch_id: "other", "names", "tape.batch_id: 'other' != 'b'"),
    ("settings", lambda text: "{", "broken", None),
    ("session_id", lambda name: "other", "broken", None),
]


@pytest.mark.parametrize(("column", "change", "reason", "path"), TAPE_FLIPS)
def test_a_changed_tape_differs(tito, column, change, reason, path):
    samples, trajectories = tables(singleton(tito, "v2").result())
    bad = changed(trajectories, column, change, row=2)
    verdict, why, paths = short(validate(tito, samples, bad).to_pylist()[0])
    assert ("differs", reason) == (verdict, why)
    assert path is None or paths[0].startswith(path)


def test_every_rollout_has_one_verdict_and_what_is_missing_differs(tito):
    results = []
    for index in range(4):
        talk = singleton(tito, "v2")
        results.append(talk.result(talk.outcome(input=RolloutInput(index=index, group_index=0, messages=[user("a")]))))
    samples, trajectories = tables(*results)
    samples = samples.filter(pc.not_equal(samples.column("index"), 1))
    trajectories = trajectories.filter(pc.not_equal(trajectories.column("index"), 2))
    parity = validate(tito, samples, trajectories, indexes=(0, 1, 2, 3, 5))
    assert [0, 1, 2, 3, 5] == parity.column("index").to_pylist()
    assert ["equal", "differs", "differs", "equal", "differs"] == parity.column("verdict").to_pylist()
    reasons = [reason and reason.split(":")[0] for reason in parity.column("reason").to_pylist()]
    assert [None, "no rows", "no tape", None, "no tape"] == reasons
    summary = summarize(parity)
    assert {"differs": 3, "equal": 2} == summary.verdicts
    assert {"differs": {"no rows": 1, "no tape": 2}} == summary.reasons
    assert 2 / 5 == summary.share
    with pytest.raises(ParityFailed, match=r"3 of 5 rollouts differ: rollout 1: no rows.*; rollout 2: no tape"):
        require_parity(parity, min_equal=0.0)


@pytest.mark.parametrize("column", ["metadata", "status"])
def test_a_row_that_cannot_be_read_does_not_hide_the_others(tito, column):
    talk = singleton(tito, "v2")
    results = [
        talk.result(talk.outcome(input=RolloutInput(index=index, group_index=0, messages=[user("a")])))
        for index in range(2)
    ]
    samples, trajectories = tables(*results)
    parity = validate(tito, changed(samples, column, lambda text: "{"), trajectories)
    assert ["differs", "equal"] == parity.column("verdict").to_pylist()
    assert ["broken", None] == [reason and reason.split(":")[0] for reason in parity.column("reason").to_pylist()]


def numbered(tito: Tito, *indexes: int) -> tuple[pa.Table, pa.Table]:
    """Rollouts that differ in index and last answer alone."""
    results = []
    for index in indexes:
        talk = singleton(tito, "v2")
        talk.ask(user("and?"), text=f"number {index}")
        results.append(talk.result(talk.outcome(input=RolloutInput(index=index, group_index=0, messages=[user("a")]))))
    return tables(*results)


def exchanged(table: pa.Table, a: int, b: int) -> pa.Table:
    """The table with the two indexes in each other's place, in the column `index` alone."""
    values = [{a: b, b: a}.get(index, index) for index in table.column("index").to_pylist()]
    return table.set_column(table.schema.get_field_index("index"), table.schema.field("index"), pa.array(values))


@pytest.mark.parametrize("both", [False, True])
def test_one_rollouts_tape_is_no_proof_for_another(tito, both):
    samples, trajectories = numbered(tito, 3, 4)
    parity = validate(tito, exchanged(samples, 3, 4) if both else samples, exchanged(trajectories, 3, 4))
    assert ["differs", "differs"] == parity.column("verdict").to_pylist()
    assert ["broken", "broken"] == [reason.split(":")[0] for reason in parity.column("reason").to_pylist()]


def test_rows_that_no_plan_has_differ_however_sound_they_are(tito):
    parity = validate(tito, *numbered(tito, 3, 4), indexes=(3,))
    assert ["equal", "differs"] == parity.column("verdict").to_pylist()
    assert "not planned: no rollout of this shard has this index" == parity.column("reason")[1].as_py()


@pytest.mark.parametrize(
    ("column", "value", "path"),
    [
        ("batch_id", "other", "sample.batch_id: 'other' != 'b'"),
        ("sample_id", "0" * 32, f"sample.sample_id: '{'0' * 32}' != '"),
    ],
)
def test_a_row_under_another_rows_name_differs(tito, column, value, path):
    samples, trajectories = tables(singleton(tito, "v2").result())
    (row,) = validate(tito, changed(samples, column, lambda name: value), trajectories).to_pylist()
    assert ("differs", "names", [True]) == (row["verdict"], row["reason"], [p.startswith(path) for p in row["paths"]])


def test_an_exchange_there_twice_is_named(tito):
    samples, trajectories = tables(singleton(tito, "v2").result())
    for row in range(2):  # the session's own, and the first exchange
        twice = pa.concat_tables([trajectories, trajectories.slice(row, 1)])
        (found,) = validate(tito, samples, twice).to_pylist()
        assert ("differs", "broken: ValueError: an exchange is missing or there twice") == (
            found["verdict"],
            found["reason"],
        )


def test_a_row_too_many_is_named(tito):
    samples, trajectories = tables(singleton(tito, "v2").result())
    (row,) = validate(tito, pa.concat_tables([samples, samples]), trajectories).to_pylist()
    assert "samples: 2 != 1" == row["paths"][0]


def cut_talk(tito: Tito) -> Conversation:
    talk = Conversation(tito, "v1")
    talk.ask(user("a"), text="x", finish="length")
    talk.ask(user("b"), text="z")
    return talk


def test_the_bound_counts_rollouts_that_have_a_sample(tito):
    talks = [singleton(tito, "v1"), singleton(tito, "v1"), cut_talk(tito), Conversation(tito, "v1")]
    results = [
        talk.result(talk.outcome(input=RolloutInput(index=index, group_index=0, messages=[user("a")])))
        for index, talk in enumerate(talks)
    ]
    parity = validate(tito, *tables(*results))
    summary = require_parity(parity, min_equal=0.66)
    assert 2 / 3 == summary.share
    assert {"not_comparable": {"no_sample": 1, "truncated_extension": 1}} == summary.reasons
    with pytest.raises(ParityFailed, match=r"0\.6667 of the rollouts with a sample .* parity_min_equal is 0\.67"):
        require_parity(parity, min_equal=0.67)
    nothing = validate(tito, *tables(results[3]))
    assert require_parity(nothing, min_equal=1.0).share is None


def test_a_wrong_identity_rule_on_one_version_is_seen(tito, monkeypatch):
    """The fault: v1 takes the index where the rule says None, as a careless driver once did."""
    samples, trajectories = tables(singleton(tito, "v2").result())

    def faulty_finish(rows, outcome):
        finished = verdict_module_finish(rows, outcome)
        if outcome.session_version == "v1":
            for sample in finished:
                sample.rollout_id = sample.index
        return finished

    verdict_module_finish = verdict_module.finish
    monkeypatch.setattr(verdict_module, "finish", faulty_finish)
    (row,) = validate(tito, samples, trajectories).to_pylist()
    assert ("differs", ["sample.rollout_id: None != 7"]) == (row["verdict"], row["paths"])
    assert row["reason"].startswith("payload: sample.rollout_id")


def test_times_of_the_wall_clock_do_not_count_between_versions_but_the_rows_do(tito):
    samples, trajectories = tables(singleton(tito, "v1").result())
    times = orjson.loads(samples.column("metadata")[0].as_py())["lifecycle"]
    times[0]["t1"] += 1.0
    bad = changed(samples, "metadata", in_json("lifecycle", times))
    (row,) = validate(tito, bad, trajectories).to_pylist()
    assert [True] == [path.startswith("sample.metadata.lifecycle[0].t1: ") for path in row["paths"]]
    assert np.isfinite(times[0]["t1"])
