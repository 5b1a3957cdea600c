"""Prompts from Delta tables and from datasets that Hugging Face's own library saved."""

import json
from datetime import UTC, datetime

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import json_values, texts

from rollout.batch.plan import config_hash, make_plan
from rollout.batch.prepare import RunOrigin, prepare
from rollout.batch.prompts import parse_prompts, read_prompts
from rollout.batch.prompttables import keep_version
from rollout.config import make_config
from rollout.errors import BadConfig, BadPrompts
from rollout.lake.staging import create_plan

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
TALK = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]
BARE_TALK = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]
ROWS = [
    {"messages": TALK, "label": "4", "metadata": {"n": 1, "share": 0.1}},
    {"messages": [USER], "label": None, "metadata": {"n": 2, "share": -0.0}},
    {"messages": [USER], "label": "ü", "metadata": None},
]


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def from_lines(rows):
    """The rows as JSONL gives them, without what says where they stood."""
    return bare(parse_prompts("\n".join(map(json.dumps, rows)).encode(), "p"))


def bare(rows):
    return [repr((row.messages, row.tools, row.label, row.metadata, row.agent, row.rollout_id)) for row in rows]


def plan(rows):
    config = make_config(n_samples_per_prompt=1)
    times = {"created_at": datetime(2026, 12, 2, tzinfo=UTC), "flow_run_id": "0" * 32}
    return make_plan(config, rows=rows, model_digest="m", **times)


def hash_of(rows):
    return config_hash(make_config(), rows.content, "m")


# Delta


def make_table(path, *batches, **options):
    schema = pa.Table.from_pylist([row for batch in batches for row in batch]).schema
    if DeltaTable.is_deltatable(str(path)):
        schema = DeltaTable(path).to_pyarrow_dataset().schema
    for batch in batches:
        write_deltalake(path, pa.Table.from_pylist(batch, schema=schema), mode="append", **options)
    return str(path)


def test_a_delta_table_gives_its_rows_in_the_order_they_were_written(tmp_path):
    path = make_table(tmp_path / "my ü prompts", ROWS[:2], ROWS[2:])
    rows = read_prompts(path)
    assert from_lines([{**ROWS[0], "messages": BARE_TALK}, *ROWS[1:]]) == bare(rows)
    assert f"{path}@v1" == rows.name
    assert [1, 2, 3] == [row.line for row in rows]


def test_partition_columns_are_columns(tmp_path):
    path = make_table(tmp_path / "t", [{"messages": [USER], "agent": "a b/%"}], partition_by=["agent"])
    make_table(path, [{"messages": [USER], "agent": "branching"}])
    assert ["a b/%", "branching"] == [row.agent for row in read_prompts(path)]


def test_a_version_can_be_named_and_stays_what_it_was(tmp_path):
    path = make_table(tmp_path / "t", ROWS[:1], ROWS[1:])
    assert (1, 3) == (len(read_prompts(f"{path}@v0")), len(read_prompts(f"{path}@v1")))
    assert list(read_prompts(path)) == list(read_prompts(f"{path}@v1"))
    with pytest.raises(BadPrompts, match=r"t@v7: .*a Delta table") as caught:
        read_prompts(f"{path}@v7")
    assert "\n" not in str(caught.value)
    (tmp_path / "p@v1").write_text(json.dumps({"messages": [USER]}))
    assert f"{tmp_path}/p@v1" == read_prompts(tmp_path / "p@v1").name, "a file of that name is that file"


def test_compacting_a_table_leaves_its_prompts_what_they_are(tmp_path):
    path = make_table(tmp_path / "t", *([row] for row in ROWS))
    before = read_prompts(path)
    write_deltalake(path, pa.Table.from_pylist(ROWS), mode="overwrite")
    DeltaTable(path).optimize.compact()
    after = read_prompts(path)
    assert bare(before) == bare(after) and before.name != after.name
    assert hash_of(before) == hash_of(after)
    assert before.content.digest == after.content.digest


def test_other_rows_or_another_order_are_other_prompts(tmp_path):
    hashes = {
        hash_of(read_prompts(make_table(tmp_path / name, rows)))
        for name, rows in {
            "a": ROWS,
            "b": ROWS[::-1],
            "c": ROWS[:2],
            "d": [{**ROWS[0], "label": "5"}, *ROWS[1:]],
            "e": [ROWS[0], {**ROWS[1], "metadata": {"n": 2, "share": 0.0}}, ROWS[2]],
        }.items()
    }
    assert 5 == len(hashes)


async def test_a_batch_goes_on_with_the_version_it_was_planned_with(tmp_path):
    path = make_table(tmp_path / "t", ROWS)
    options = {"prompts": path, "lake": str(tmp_path / "lake"), "batch_id": "b"}
    batch = await prepare(options, RunOrigin.now())
    create_plan(batch.paths, batch.plan)
    assert f"{path}@v0" == batch.plan.config["prompts"]
    make_table(path, ROWS[:1])
    for given_ in (options, {**options, "prompts": f"{path}@v0"}, {"lake": options["lake"], "batch_id": "b"}):
        again = await prepare(given_, RunOrigin.now())
        assert (3, batch.plan.config_hash, True) == (len(again.rows), again.plan.config_hash, again.planned)
    with pytest.raises(BadConfig, match="planned with another configuration"):
        await prepare({**options, "prompts": f"{path}@v1"}, RunOrigin.now())
    fresh = await prepare({**options, "batch_id": "c"}, RunOrigin.now(), known=batch.rows)
    assert 4 == len(fresh.rows)


def test_only_the_same_table_keeps_its_version():
    assert "t@v3" == keep_version("t", "t@v3") == keep_version("t@v3", "t@v3")
    assert "u" == keep_version("u", "t@v3") and "t@v4" == keep_version("t@v4", "t@v3")
    assert "t" == keep_version("t", "t")


def test_other_columns_of_a_table_are_named(tmp_path):
    with pytest.raises(BadPrompts, match="unknown column prompt, id; known are messages"):
        read_prompts(make_table(tmp_path / "t", [{"messages": [USER], "prompt": "x", "id": 1}]), skip_bad=True)


def test_a_bad_row_of_a_table_is_named_or_recorded(tmp_path):
    path = make_table(tmp_path / "t", [{"messages": [USER]}, {"messages": None}])
    with pytest.raises(BadPrompts, match="t@v0, row 2: messages is missing"):
        read_prompts(path)
    assert [None, "row 2: messages is missing"] == [row.refused for row in read_prompts(path, skip_bad=True)]


def test_an_empty_table_and_a_damaged_one_are_one_line(tmp_path):
    path = make_table(tmp_path / "t", ROWS)
    DeltaTable(path).delete()
    with pytest.raises(BadPrompts, match="no prompts in it"):
        read_prompts(path)
    path = make_table(tmp_path / "gone", ROWS)
    for file in (tmp_path / "gone").glob("*.parquet"):
        file.unlink()
    with pytest.raises(BadPrompts, match="cannot be read as a Delta table") as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)
    (tmp_path / "torn" / "_delta_log").mkdir(parents=True)
    with pytest.raises(BadPrompts, match="no Delta table is there"):
        read_prompts(tmp_path / "torn")


# Other folders


def test_a_lake_is_no_table_and_its_tables_are_named(tmp_path):
    make_table(tmp_path / "lake" / "tables" / "samples", [{"tokens": [1]}])
    make_table(tmp_path / "lake" / "tables" / "prompts", ROWS)
    with pytest.raises(BadPrompts, match=r"a lake, not a table; .*lake/tables/<name> \(there: prompts, samples\)"):
        read_prompts(tmp_path / "lake")
    with pytest.raises(BadPrompts, match="unknown column tokens"):
        read_prompts(tmp_path / "lake/tables/samples")
    assert 3 == len(read_prompts(tmp_path / "lake/tables/prompts"))


def test_any_other_folder_is_refused_with_what_would_do(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with pytest.raises(BadPrompts, match=r"neither a Delta table \(_delta_log\) nor a dataset .*save_to_disk"):
        read_prompts(tmp_path)


# Datasets on disk


def test_a_saved_dataset_gives_its_rows(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "d", num_shards=2)
    rows = read_prompts(tmp_path / "d")
    assert 2 == len(list((tmp_path / "d").glob("*.arrow")))
    assert from_lines([{**ROWS[0], "messages": BARE_TALK}, *ROWS[1:]]) == bare(rows)
    assert str(tmp_path / "d") == rows.name and [1, 2, 3] == [row.line for row in rows]
    assert hash_of(rows) == hash_of(read_prompts(make_table(tmp_path / "t", ROWS))), "the rows count, not the format"


def test_a_selection_of_a_dataset_is_what_was_saved(tmp_path):
    datasets.Dataset.from_list(ROWS).select([2, 1]).save_to_disk(tmp_path / "d")
    assert from_lines([ROWS[2], ROWS[1]]) == bare(read_prompts(tmp_path / "d"))


def test_json_features_are_read_and_keep_their_nulls(tmp_path):
    features = {"messages": datasets.List(datasets.Json()), "metadata": datasets.Json(), "label": datasets.Json()}
    rows = [{"messages": TALK, "metadata": {"a": [None, 0.5]}, "label": "4"}]
    rows += [{"messages": [USER], "metadata": {"b": {"c": None}}, "label": 4}]
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "d")
    assert from_lines(rows) == bare(read_prompts(tmp_path / "d"))


@given(rows=st.lists(st.tuples(texts, st.dictionaries(texts, json_values, max_size=3)), min_size=1, max_size=5))
@settings(deadline=None, max_examples=30)
def test_any_json_survives_a_saved_dataset(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("property")
    found = [{"messages": [{"role": "user", "content": a}], "metadata": json.dumps(b)} for a, b in rows]
    datasets.Dataset.from_list(found).save_to_disk(path)
    assert from_lines([{**row, "metadata": json.loads(row["metadata"])} for row in found]) == bare(read_prompts(path))


def test_a_dataset_with_splits_is_refused_and_says_how_to_point_at_one(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "d")
    with pytest.raises(BadPrompts, match=r"the splits train, test; give one of them, as in .*/d/train$"):
        read_prompts(tmp_path / "d")
    assert 3 == len(read_prompts(tmp_path / "d" / "train"))


def test_other_columns_and_bad_rows_of_a_dataset_are_named(tmp_path):
    datasets.Dataset.from_list([{"messages": [USER], "id": 1}]).save_to_disk(tmp_path / "a")
    with pytest.raises(BadPrompts, match="unknown column id; known are messages"):
        read_prompts(tmp_path / "a")
    datasets.Dataset.from_list([{"messages": [USER]}, {"messages": []}]).save_to_disk(tmp_path / "b")
    with pytest.raises(BadPrompts, match="b, row 2: messages is empty"):
        read_prompts(tmp_path / "b")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("{", "state.json is damaged"),
        ("[]", "state.json lists no _data_files"),
        ('{"_data_files": [7]}', "state.json lists no _data_files"),
        ('{"_data_files": []}', "no prompts in it"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "cannot be read: No such file"),
        ('{"_data_files": [{"filename": "state.json"}]}', "cannot be read as a saved dataset"),
        ('{"_data_files": [{"filename": "a.arrow"}, {"filename": "b.arrow"}]}', "b.arrow has other columns"),
        ('{"_data_files": [{"filename": "torn.arrow"}]}', "cannot be read as a saved dataset"),
    ],
)
def test_a_damaged_dataset_is_one_line(state, said, tmp_path):
    """A folder made by hand in the layout of save_to_disk."""
    for name, rows in {"a": ROWS, "b": [{"label": "x"}]}.items():
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "torn.arrow").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(BadPrompts, match=said) as caught:
        read_prompts(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    assert 3 == len(read_prompts(tmp_path))


def test_two_rows_with_one_rollout_id_are_named_by_their_rows(tmp_path):
    rows = read_prompts(make_table(tmp_path / "t", [{"messages": [USER], "rollout_id": k} for k in (1, 7, 7)]))
    with pytest.raises(BadPrompts, match="t@v0, rows 2 and 3: both have rollout_id 7"):
        plan(rows)


def test_a_column_that_came_later_is_absent_in_earlier_rows(tmp_path):
    path = make_table(tmp_path / "t", [{"messages": [USER]}])
    write_deltalake(path, pa.Table.from_pylist(ROWS[1:2]), mode="append", schema_mode="merge")
    assert from_lines([{"messages": [USER]}, ROWS[1]]) == bare(read_prompts(path))
