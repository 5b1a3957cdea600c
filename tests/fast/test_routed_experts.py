"""Routed experts from the engine's answer to the lake: row i always belongs to token i."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from lake_batch import plan_batch, publish, stamp_rows, tape_rows
from routed import ROUTED, RoutedConversation, routed_tito, rows_of
from scripted import START, Conversation, play, tables, user
from strategies import conversations
from thousands import twice

from rollout.columns import table_to_samples
from rollout.engine.tiny import CHECKPOINT
from rollout.lake import scan_samples
from rollout.lake.datafile import write_data_file
from rollout.lake.paths import LakePaths
from rollout.lake.staging import create_plan, stage_shard
from rollout.parity.validate import validate_tables
from rollout.sample import InvalidSample, Sample
from rollout.session.tape import table_to_tape, tape_to_table
from rollout.tito.tokenizer import Tokenizer

TITO = routed_tito()
VERSIONS = ("v1", "v2")


def talked(version: str, *texts: str, **settings: Any) -> RoutedConversation:
    talk = RoutedConversation(TITO, version, **settings)
    for text in texts:
        talk.ask(user(text))
    return talk


def check_rows(sample: Sample) -> None:
    """The sample's rows are those of its tokens."""
    sample.validate()
    rows = rows_of(sample.tokens_T.tolist())
    assert list(rows.shape) == sample.routed_experts_shape
    assert rows.tobytes() == sample.routed_experts


# What a turn asks for


def test_a_turn_asks_for_the_rows_from_its_parents_last_id_on() -> None:
    talk = talked("v2", "a", "b")
    first, second = talk.session.nodes
    assert second.n_tokens - first.n_tokens == second.generation.routed_experts_shape[0]
    turn = talk.begin([*talk.history, user("c")])
    assert (True, second.n_tokens - 1) == (
        turn.engine_request["return_routed_experts"],
        turn.engine_request["routed_experts_start_len"],
    )
    root = talk.begin([user("other")])
    assert 0 == root.engine_request["routed_experts_start_len"]


def test_a_turn_behind_one_without_rows_asks_for_all() -> None:
    talk = RoutedConversation(TITO, "v2")
    talk.ask(user("a"), text="part", finish="abort")
    assert 0 == talk.begin([*talk.history, user("b")]).experts.start


def test_a_session_that_wants_none_asks_for_none() -> None:
    request = Conversation(TITO, "v2").begin([user("a")]).engine_request
    assert not {"return_routed_experts", "routed_experts_start_len", "lora_path"} & set(request)


def test_a_session_with_an_adapter_names_it_in_every_request_and_row() -> None:
    talk = Conversation(TITO, "v2", lora="tuned")
    talk.ask(user("a"))
    assert "tuned" == talk.begin([*talk.history, user("b")]).engine_request["lora_path"]
    assert "tuned" == talk.session.samples().samples[0].lora


# A sample's rows


@pytest.mark.parametrize("version", VERSIONS)
def test_the_turns_rows_are_joined_and_cut_with_the_tokens(version: str) -> None:
    talk = talked(version, "a", "b", "c")
    check_rows(talk.session.samples().samples[0])
    n_tokens = talk.session.nodes[-1].n_tokens
    for limit in range(talk.session.nodes[0].n_prompt + 1, n_tokens):
        (sample,) = talk.session.samples(max_seq_len=limit).samples
        check_rows(sample)


def test_branches_share_the_rows_of_what_they_share() -> None:
    talk = talked("v2", "a", "b")
    shared = talk.history[:2]
    talk.ask(user("c"))
    talk.history = shared
    talk.ask(user("x"))
    talk.ask(user("y"))
    samples = talk.session.samples().samples
    assert 2 == len(samples)
    for sample in samples:
        check_rows(sample)


def test_where_a_later_turn_gives_a_row_again_its_own_holds() -> None:
    talk = talked("v2", "a", "b")
    talk.whole = True
    turn = talk.begin([*talk.history, user("c")])
    other = rows_of([*turn.prompt_ids, 5, 6]) + 1
    talk.commit(turn, [5, 6], routed_experts=other.tobytes(), routed_experts_shape=list(other.shape))
    assert other.tobytes() == talk.session.samples().samples[0].routed_experts


def test_a_sample_with_a_missing_row_has_none() -> None:
    talk = talked("v2", "a")
    turn = talk.begin([*talk.history, user("b")])
    late = rows_of([*turn.prompt_ids, 5, 6])[turn.experts.start + 1 :]
    talk.commit(turn, [5, 6], routed_experts=late.tobytes(), routed_experts_shape=list(late.shape))
    (sample,) = talk.session.samples().samples
    sample.validate()
    assert (None, None) == (sample.routed_experts, sample.routed_experts_shape)


def test_a_sample_refuses_rows_that_are_not_its_tokens() -> None:
    (sample,) = talked("v2", "a").session.samples().samples
    n_rows = sample.routed_experts_shape[0]
    for data, shape in (
        (None, [n_rows, *ROUTED]),
        (sample.routed_experts, None),
        (sample.routed_experts[:-4], [n_rows, *ROUTED]),
        (sample.routed_experts[:-24], [n_rows - 1, *ROUTED]),
    ):
        with pytest.raises(InvalidSample, match="routed_experts"):
            replace(sample, routed_experts=data, routed_experts_shape=shape).validate()


# The tape, its replay and the lake


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tape_has_every_row_once(version: str) -> None:
    talk = talked(version, "a", "b", "c")
    tape, _ = table_to_tape(tape_to_table(talk.session.tape()))
    shapes = [exchange.routed_experts_shape for exchange in tape.exchanges]
    assert talk.session.nodes[-1].n_tokens - 1 == sum(rows for rows, *_ in shapes)
    assert {ROUTED} == {tuple(shape[1:]) for shape in shapes}


def verdicts(samples: Any, trajectories: Any) -> list[dict[str, Any]]:
    return validate_tables(samples, trajectories, TITO, batch_id="b", engine="e", created_at=START).to_pylist()


@pytest.mark.parametrize("version", VERSIONS)
def test_parity_compares_the_rows_bytes(version: str) -> None:
    samples, trajectories = tables(talked(version, "a", "b").result())
    assert ["equal"] == [row["verdict"] for row in verdicts(samples, trajectories)]
    column = trajectories.column("routed_experts").to_pylist()
    column[2] = column[2][:-1] + bytes([column[2][-1] ^ 1])
    place = trajectories.schema.get_field_index("routed_experts")
    broken = trajectories.set_column(place, trajectories.schema.field(place), [column])
    (row,) = verdicts(samples, broken)
    assert "differs" == row["verdict"]
    assert row["paths"][0].startswith("sample.routed_experts")


def test_published_rows_are_the_sessions_bit_for_bit(tmp_path: Path) -> None:
    result = talked("v2", "a", "b").result()
    plan, paths = plan_batch(n_samples_per_prompt=1, shard_size=6), LakePaths(str(tmp_path / "lake"))
    create_plan(paths, plan)
    rows = [replace(result.samples[0], index=index, group_index=index) for index in range(6)]
    manifest = stage_shard(paths, plan, 0, stamp_rows(plan, 0, rows), tape_rows(plan, 0), {})
    publish(paths, plan, {0: manifest})
    read = scan_samples(paths).collect()
    assert {result.samples[0].routed_experts} == set(read["routed_experts"])
    assert [result.samples[0].routed_experts_shape] * 6 == read["routed_experts_shape"].to_list()


def test_a_shard_beyond_arrows_offsets_is_written_row_by_row_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, _ = tables(talked("v2", "a", "b").result(), talked("v2", "c").result())
    chunked = pa.concat_tables([samples.slice(0, 1), samples.slice(1, 1)])
    order = np.array([1, 0])
    small = write_data_file(samples, order, tmp_path / "small", "samples")
    monkeypatch.setattr("rollout.lake.schema.TAKEN_AT_ONCE", 0)
    assert small == write_data_file(chunked, order, tmp_path / "large", "samples")
    (row,) = verdicts(*tables(talked("v2", "a").result()))
    assert "equal" == row["verdict"]


def check_any_conversation(steps: list[Any], version: str, whole: bool, limit: int | None) -> None:
    talk = RoutedConversation(TITO, version, max_seq_len=limit)
    talk.whole = whole
    play(talk, steps)
    samples, trajectories = tables(talk.result())
    for sample in table_to_samples(samples):
        if sample.routed_experts is not None:
            check_rows(sample)
        else:  # nothing was sampled, or the first turn was aborted
            assert sample.turns <= 1 and sample.status in ("failed", "aborted", "truncated")
    (row,) = verdicts(samples, trajectories)
    assert "differs" != row["verdict"], (row["reason"], row["paths"])


_rows_line_up, test_rows_line_up_thousands = twice(
    check_any_conversation,
    steps=conversations,
    version=st.sampled_from(VERSIONS),
    whole=st.booleans(),
    limit=st.sampled_from([None, None, 60, 120]),
    fast=100,
    full=2000,
)


def test_rows_line_up_whatever_a_client_does() -> None:
    _rows_line_up()


# The model's own statement


@pytest.mark.parametrize(
    ("config", "routed"),
    [
        ({"num_hidden_layers": 48, "num_experts_per_tok": 8}, (48, 8)),
        ({"text_config": {"num_hidden_layers": 4, "num_experts_per_tok": 2}, "num_hidden_layers": 9}, (4, 2)),
        ({"num_hidden_layers": 4}, None),
        ({"num_hidden_layers": 4, "num_experts_per_tok": None}, None),
        ({"num_hidden_layers": 4, "num_experts_per_tok": 0}, None),
        ({}, None),
    ],
)
def test_layers_and_experts_per_token_are_the_configs(
    config: dict[str, Any], routed: tuple[int, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert routed == Tokenizer(tmp_path).routed
