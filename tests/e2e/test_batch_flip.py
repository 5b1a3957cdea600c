"""One changed value in a staged file is found, named by its path, and keeps the batch from being published."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect_seen import artifacts_of

from rollout.lake.datafile import file_digest

KINDS = ("log-prob", "token", "mask", "rollout_id", "metadata")


def manifests(lake: Path):
    for path in sorted((lake / "staging" / "mine" / "shards").iterdir()):
        yield path, json.loads(path.read_text())


def branched_row(lake: Path):
    """(manifest path, data file, table, row) of a staged sample that has a rollout_id and a long response."""
    for manifest, content in manifests(lake):
        (entry,) = [file for file in content["files"] if file["table"] == "samples"]
        data = lake / "staging" / "mine" / entry["path"]
        table = pq.ParquetFile(data).read()
        for row, (rollout_id, length) in enumerate(
            zip(table["rollout_id"].to_pylist(), table["response_length"].to_pylist(), strict=True)
        ):
            if rollout_id is not None and length > 20:
                return manifest, data, table, row
    raise AssertionError("no staged sample has a rollout_id")


def changed(table: pa.Table, row: int, kind: str) -> tuple[pa.Table, str]:
    """The table with one value of one row changed, and the path below the sample that says so."""
    values = {name: table[name].to_pylist() for name in ("tokens", "loss_mask", "rollout_log_probs")}
    if kind == "log-prob":
        at = next(k for k, v in enumerate(values["rollout_log_probs"][row]) if v != 0.0)
        bits = np.array(values["rollout_log_probs"][row][at : at + 1]).view(np.uint64)
        values["rollout_log_probs"][row][at] = float((bits ^ np.uint64(1)).view(np.float64)[0])
        return replaced(table, "rollout_log_probs", values["rollout_log_probs"]), f"rollout_log_probs[{at}]"
    if kind == "token":
        values["tokens"][row][11] ^= 1
        return replaced(table, "tokens", values["tokens"]), "tokens[11]"
    if kind == "mask":
        values["loss_mask"][row][13] ^= 1
        return replaced(table, "loss_mask", values["loss_mask"]), "loss_mask[13]"
    if kind == "rollout_id":
        ids = table["rollout_id"].to_pylist()
        ids[row] ^= 1
        return replaced(table, "rollout_id", ids), "rollout_id"
    metadata = table["metadata"].to_pylist()
    content = json.loads(metadata[row])
    content["kind"] = content["kind"] + "s"
    metadata[row] = json.dumps(content)
    return replaced(table, "metadata", metadata), "metadata.kind"


def replaced(table: pa.Table, name: str, values: list) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def flip(lake: Path, kind: str) -> tuple[int, str, Path, dict]:
    """Rewrite one staged file with one value changed; (index, path, manifest file, manifest that fits it)."""
    manifest, data, table, row = branched_row(lake)
    table, path = changed(table, row, kind)
    pq.write_table(table, data)
    content = json.loads(manifest.read_text())
    (entry,) = [file for file in content["files"] if file["table"] == "samples"]
    with data.open("rb") as file:
        entry["digest"] = file_digest(file)
    entry["size"] = data.stat().st_size
    sibling = table["sibling"][row].as_py()
    return table["index"][row].as_py(), f"sample[{sibling}].{path}", manifest, content


def nothing_is_published(lake: Path) -> bool:
    log = lake / "tables" / "samples" / "_delta_log"
    return not log.exists() or not any('"add"' in path.read_text() for path in log.glob("*.json"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_flip_under_a_rewritten_manifest_is_named_and_quarantines(quick_rollout, staged_lake: Path, kind: str):
    index, path, manifest, content = flip(staged_lake, kind)
    manifest.write_text(json.dumps(content))
    done = quick_rollout("run", "--batch-id", "mine", "--lake", staged_lake)
    assert 1 == done.returncode, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"1 of 32 rollouts differ: rollout {index}: {path}: " in last and "(+" not in last
    assert nothing_is_published(staged_lake)
    shown = json.loads(quick_rollout("parity", "mine", "--lake", staged_lake, "--json").stdout)
    (differing,) = shown["differing"]
    assert ("quarantined", index, 1) == (shown["status"], differing["index"], len(differing["paths"]))
    assert differing["paths"][0].startswith(f"{path}: ")
    report = json.loads((staged_lake / "quarantine" / "mine" / "report.json").read_text())
    assert differing["paths"] == report["differing"][0]["paths"]
    shown = artifacts_of(quick_rollout.environment["PREFECT_API_URL"], "mine")
    for text in (shown["rollout-batch-report"], shown["rollout-batch-parity"]):
        assert f"| rollout | {index} |" in text and f"| path | {path} |" in text
    assert "is not published" in shown["rollout-batch-lake"]
    line = quick_rollout.refused("run", "--batch-id", "mine", "--lake", staged_lake)
    assert "quarantined" in line and "rollout release mine" in line and "rollout discard mine" in line


@pytest.mark.parametrize("kind", ["log-prob", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS[1:])])
def test_a_flip_under_the_old_manifest_is_refused_as_changed(quick_rollout, staged_lake: Path, kind: str):
    flip(staged_lake, kind)
    done = quick_rollout("run", "--batch-id", "mine", "--lake", staged_lake)
    assert 1 == done.returncode
    assert "its manifest says" in done.stderr.splitlines()[-1]
    assert nothing_is_published(staged_lake)
    assert not (staged_lake / "quarantine").exists()
