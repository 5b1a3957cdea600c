"""Prompts through the real command: one bad row among many, and prompts that are no file."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from rollout.batch.prompts import parse_prompts
from rollout.lake import scan_parity, scan_samples

QUICK = ("--agent", "single_turn", "--n-samples-per-prompt", "1", "--max-new-tokens", "8", "--max-turns", "1")


def question(k: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"What is {k} + 1?"}], "label": str(k + 1)}


def one_without_messages(path: Path, n: int) -> int:
    """`n` rows of which one, in the middle, has no messages; its line."""
    rows = [question(k) for k in range(n)]
    rows[n // 2] = {"label": "4"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return n // 2 + 1


@pytest.mark.timeout(600)
@pytest.mark.full
def test_g25_one_row_without_messages_among_a_thousand(quick_rollout, tmp_path):
    """Refused with its line before anything runs; with --skip-bad-prompts 999 run and one is recorded as failed."""
    rollout, folder, n = quick_rollout, tmp_path, 1000
    line = one_without_messages(folder / "prompts.jsonl", n)
    command = ("run", "--prompts", "prompts.jsonl", "--batch-id", "mine", *QUICK)
    assert f"prompts.jsonl, line {line}: messages is missing" == rollout.refused(*command)
    assert not (folder / "lake").exists()

    done = rollout.start(*command, "--skip-bad-prompts", "--json").wait(timeout_s=500)
    assert 0 == done.returncode, done.stderr
    samples = scan_samples(folder / "lake", batch="mine").collect()
    assert list(range(n)) == sorted(samples["index"])
    by_index = {row["index"]: row for row in samples.to_dicts()}
    bad = by_index.pop(line - 1)
    assert ("bad_prompt", f"line {line}: messages is missing") == tuple(bad["failure"].values())
    assert ("failed", True, None, [], 0) == (
        *(bad["status"], bad["remove_sample"], bad["reward"], bad["tokens"], bad["response_length"]),
    )
    assert n - 1 == len(by_index)
    for row in by_index.values():
        assert (None, "[") == (row["failure"], row["prompt"][0]) and row["reward"] is not None and row["tokens"]
    verdicts = dict(scan_parity(folder / "lake", batch="mine").collect().select("index", "verdict").iter_rows())
    assert "not_comparable" == verdicts.pop(line - 1) and {"equal"} == set(verdicts.values())
    summary = json.loads(done.stdout)
    assert (n, "published") == (summary["rollouts"], summary["status"])


@pytest.mark.full
def test_prompts_of_a_lake_table_go_on_at_the_version_they_began_with(quick_rollout, tmp_path):
    table = tmp_path / "lake" / "tables" / "prompts"
    write_deltalake(table, pa.Table.from_pylist([question(k) for k in range(3)]))
    said = quick_rollout.refused("run", "--prompts", "lake")
    assert "a lake, not a table; give a table of prompts, as lake/tables/<name> (there: prompts)" in said
    command = ("run", "--prompts", "lake/tables/prompts", "--batch-id", "mine", *QUICK)
    planned = json.loads(quick_rollout.succeeds(*command, "--dry-run", "--json"))
    assert "lake/tables/prompts@v0" == planned["config"]["prompts"]
    quick_rollout.succeeds(*command)
    write_deltalake(table, pa.Table.from_pylist([question(9)]), mode="append")
    assert "is published already" in quick_rollout.succeeds(*command)
    samples = scan_samples(tmp_path / "lake", batch="mine").collect()
    assert ["1", "2", "3"] == sorted(samples["label"]), "the lake's own tables and a table of prompts live together"
    assert 4 == json.loads(quick_rollout.succeeds(*command[:3], "--dry-run", "--json"))["prompts"]


def test_prompts_of_a_saved_dataset(quick_rollout, tmp_path):
    import datasets

    datasets.disable_progress_bars()
    one = datasets.Dataset.from_list([question(k) for k in range(3)])
    datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "saved")
    assert "the splits train; give one of them, as in saved/train" in quick_rollout.refused("run", "--prompts", "saved")
    quick_rollout.succeeds("run", "--prompts", "saved/train", "--batch-id", "mine", *QUICK)
    samples = scan_samples(tmp_path / "lake", batch="mine").collect().sort("index")
    assert ["1", "2", "3"] == samples["label"].to_list()
    wanted = parse_prompts("\n".join(json.dumps(question(k)) for k in range(3)).encode(), "p")
    assert [row.messages for row in wanted] == [json.loads(text)[:1] for text in samples["prompt"]]
