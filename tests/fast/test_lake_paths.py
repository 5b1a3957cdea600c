import os
from pathlib import Path

import pytest

from rollout.errors import BadConfig, BadInput, BadLake
from rollout.lake.paths import LakePaths, s3_options
from rollout.lake.store import LocalStore, check_key


def test_the_layout_is_the_contracts(tmp_path):
    paths = LakePaths(tmp_path)
    assert f"{tmp_path}/tables/samples" == paths.table_uri("samples")
    assert "staging/b1/plan.json" == paths.plan_key("b1")
    assert "quarantine/b1" == paths.folder("b1", "quarantine")


def test_a_relative_path_and_a_file_uri_are_the_same_lake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert LakePaths("./lake").uri == LakePaths(f"file://{tmp_path}/lake").uri == LakePaths(tmp_path / "lake").uri


def test_an_s3_lake_has_the_same_layout():
    paths = LakePaths("s3://bucket/some/prefix/", {"aws_region": "us-east-1"})
    assert "s3://bucket/some/prefix/tables/samples" == paths.table_uri("samples")
    assert {"aws_region": "us-east-1"} == paths.storage_options
    assert not paths.is_local


def test_s3_options_come_from_the_aws_variables():
    found = s3_options(
        {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:8333",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_DEFAULT_REGION": "us-east-1",
            "HOME": "x",
        }
    )
    assert found == {
        "aws_endpoint_url": "http://127.0.0.1:8333",
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
    }
    assert "aws_allow_http" not in s3_options({"AWS_ENDPOINT_URL": "https://store.example"})


@pytest.mark.parametrize(
    "uri", ["gs://b/x", "s3://", "s3://b/../c", "s3://b//c", "", "a\nb", "lake[1]", "a*", "a?", "a\\b"]
)
def test_other_uris_are_refused_in_one_line(uri):
    with pytest.raises(BadLake) as caught:
        LakePaths(uri)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch_id", ["x y", "/x", "ü", "50%", "Q&A", "../x", "", ".x", "a/b", "A", "a" * 81, "a\n"])
def test_batch_ids_outside_the_pattern_are_refused_by_name(tmp_path, batch_id):
    """G53."""
    with pytest.raises(BadConfig, match="does not match") as caught:
        LakePaths(tmp_path).folder(batch_id)
    assert repr(batch_id) in str(caught.value)


@pytest.mark.parametrize("key", ["../x", "/x", "a/../b", "a//b", ".hidden", "a/.x", "", "a/", "a b", "a\n"])
def test_keys_cannot_leave_the_lake(tmp_path, key):
    with pytest.raises(ValueError):
        check_key(key)
    with pytest.raises(ValueError):
        LocalStore(tmp_path).read(key)


def test_a_new_lake_is_writable_and_the_check_leaves_nothing_but_its_folder(tmp_path):
    LakePaths(tmp_path / "a" / "lake").check_writable()
    assert [] == os.listdir(tmp_path / "a" / "lake")


def test_foreign_content_is_fine(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    LakePaths(tmp_path).check_writable()
    assert ["notes.txt", "other"] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("where", ["", "tables", "tables/samples", "staging", "quarantine"])
def test_a_file_in_the_way_is_refused(tmp_path, where):
    file = tmp_path / "lake" / where
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x")
    with pytest.raises(BadLake, match="is a file"):
        LakePaths(tmp_path / "lake").check_writable()


def test_a_table_folder_that_is_no_delta_table_is_refused(tmp_path):
    (tmp_path / "tables/samples").mkdir(parents=True)
    (tmp_path / "tables/samples/part.parquet").write_text("x")
    with pytest.raises(BadLake, match="tables/samples holds files but is no Delta table"):
        LakePaths(tmp_path).check_writable()


def test_a_path_that_cannot_be_written_is_refused_whoever_runs_the_test():
    with pytest.raises(BadLake, match="not writable") as caught:
        LakePaths("/proc/lake").check_writable()
    assert isinstance(caught.value, BadInput) and "\n" not in str(caught.value)


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadLake, match="is a file; choose another --lake"):
        LakePaths(tmp_path / "file" / "lake").check_writable()


def test_a_disk_without_hard_links_is_refused(tmp_path, monkeypatch):
    def fault_no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", fault_no_links)
    with pytest.raises(BadLake, match="no hard links"):
        LakePaths(tmp_path).check_writable()


def test_exclusive_creation_has_one_winner_and_whole_files(tmp_path):
    store = LocalStore(tmp_path)
    assert store.create("a/b.json", b"first")
    assert not store.create("a/b.json", b"second")
    assert b"first" == store.read("a/b.json")
    assert ["b.json"] == os.listdir(tmp_path / "a")


def test_a_write_that_fails_leaves_nothing_under_the_final_name(tmp_path, monkeypatch):
    """G55 on a local disk."""

    def fault_disk_full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "fsync", fault_disk_full)
    with pytest.raises(OSError, match="No space"):
        store.create("a/b.json", b"x")
    assert [] == os.listdir(tmp_path / "a")
