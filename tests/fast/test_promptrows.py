"""Rows are checked once and kept packed: what comes back is what an eager reader of the whole file gives."""

import asyncio
import hashlib
import json
import os
import threading
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import json_values, texts

from rollout.batch import content as contents
from rollout.batch import promptrow
from rollout.batch.content import Content
from rollout.batch.plan import config_hash
from rollout.batch.prepare import RunOrigin, prepare
from rollout.batch.promptparse import ROW_KEYS, parse_json
from rollout.batch.promptrow import RowRefused, check_row, plain_json
from rollout.batch.promptrows import PromptRow
from rollout.batch.prompts import paced, parse_prompts, read_prompts
from rollout.batch.rowstore import RowStore
from rollout.columns import blake2b_256, dump_json
from rollout.config import make_config
from rollout.errors import BadPrompts

USER = {"role": "user", "content": "hi"}


# The packed rows


@given(rows=st.lists(st.binary(max_size=40), max_size=60), block=st.integers(1, 100), memory=st.integers(0, 300))
@settings(deadline=None)
def test_a_store_gives_every_row_back_wherever_it_lies(rows, block, memory):
    store = RowStore(block_bytes=block, memory_bytes=memory)
    for row in rows:
        store.append(row)
    store.close()
    assert len(rows) == len(store)
    assert rows == [store[k] for k in range(len(rows))]
    assert rows[::-1] == [store[k] for k in reversed(range(len(rows)))]
    for position in (-1, len(rows)):
        with pytest.raises(IndexError):
            store[position]


def test_a_store_is_read_by_several_threads():
    store = RowStore(block_bytes=64, memory_bytes=512)
    rows = [str(k).encode() * 5 for k in range(500)]
    for row in rows:
        store.append(row)
    store.close()
    wrong = []

    def read(step):
        wrong.extend(k for k in range(0, 5000, step) if store[k * 7 % 500] != rows[k * 7 % 500])

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong


def test_a_full_disk_is_one_line_that_names_the_folder(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    store = RowStore(block_bytes=1, memory_bytes=0)
    with pytest.raises(BadPrompts, match="No space left on device; set TMPDIR"):
        store.append(b"x")


# Lazy and eager


@dataclass
class Eager:
    """A reader that parses a whole file strictly and keeps every row, as simple as it can be."""

    data: bytes
    rows: list[PromptRow] = field(default_factory=list)

    def read(self) -> list[PromptRow]:
        for number, line in enumerate(self.data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if line.strip():
                self._read_line(number, line.rstrip(b"\r"))
        return self.rows

    def _read_line(self, number: int, raw: bytes) -> None:
        where = {"line": number, "digest": hashlib.blake2b(raw, digest_size=16).hexdigest()}
        try:
            row = parse_json(raw)
            if not isinstance(row, dict):
                raise RowRefused(f"{'null' if row is None else type(row).__name__} where an object is wanted")
            unknown = [key for key in row if key not in ROW_KEYS]
            if unknown:
                raise RowRefused(f"unknown key {', '.join(map(repr, unknown))}; known are {', '.join(ROW_KEYS)}")
            if row.get("messages") is not None:
                promptrow._check_json(row, "", 0)
            check_row(row)
        except RowRefused as error:
            self.rows.append(PromptRow(**where, refused=f"line {number}: {error}"))
            return
        label = row.get("label")
        given = {key: row[key] for key in ROW_KEYS if row.get(key) is not None}
        if label is not None and not isinstance(label, str):
            given["label"] = dump_json(label)
        self.rows.append(PromptRow(**where, **given))


def escaped(value):
    """JSON in which text is spelled with escapes, colons too."""
    return json.dumps(value).replace("a", "\\u0061")


ODD_NUMBERS = ["0", "-0", "-0.0", "1e400", "1E5", "0.1", "1e22", "01", "5e-324", "NaN", "9007199254740993"]
ODD_NUMBERS += [str(limit + step) for limit in (-(2**63), 2**63, 2**64) for step in (-1, 0)] + ["1" * 4400]
ODD_TEXTS = ['"\\ud800"', '"\\u003a"', '":"', '"\x01"']
TWICE = ['{"a":1,"a":2}', '{"a":"\\u003A","a":2}', '{"a\\u003a":1,"b":{"a":":","a":1}}']
DEEP = ["[" * n + inner + "]" * n for n in (97, 98, 99, 100, 300) for inner in ("", "1")]
odd_values = st.sampled_from(ODD_NUMBERS + ODD_TEXTS + TWICE + DEEP)
values = st.builds(json.dumps, json_values) | st.builds(escaped, texts | json_values) | odd_values
good_messages = st.just(json.dumps([USER])) | st.builds(
    lambda text: json.dumps([{"role": "user", "content": text}], ensure_ascii=False), texts
)


@st.composite
def lines(draw):
    """A line: a row that may run, with odd values; seldom other keys, other shapes, or bytes of any kind."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=20).map(lambda data: data.replace(b"PAR1", b"")) | values.map(str.encode))
    pairs = [("messages", draw(good_messages | values))]
    others = st.tuples(st.sampled_from([*ROW_KEYS, "other"]), values)
    pairs += draw(st.lists(others, max_size=3))
    text = "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"
    data = text.encode(errors="surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=2)) + data[at:]
    return data + draw(st.sampled_from([b"", b"\r", b" "]))


@given(found=st.lists(lines(), min_size=1, max_size=6), bom=st.booleans())
@settings(deadline=None, max_examples=200)
def test_lazy_rows_are_those_of_an_eager_reader(found, bom):
    data = (b"\xef\xbb\xbf" if bom else b"") + b"\n".join([json.dumps({"messages": [USER]}).encode(), *found])
    rows, wanted = parse_prompts(data, "p", skip_bad=True), Eager(data).read()
    assert len(wanted) == len(rows)
    for have, want in zip(rows, wanted, strict=True):
        assert repr(want) == repr(have), "repr tells 1 from 1.0 and from True, and one zero from the other"
    assert rows.n_refused == sum(row.refused is not None for row in wanted)
    first_bad = next((row.refused for row in wanted if row.refused is not None), None)
    if first_bad is not None:
        with pytest.raises(BadPrompts) as caught:
            parse_prompts(data, "p")
        assert f"p, {first_bad}" == str(caught.value)


@given(value=st.dictionaries(texts, json_values, max_size=4))
def test_plain_json_reads_back_as_it_was(value):
    text = plain_json(value)
    assert text is None or repr(value) == repr(orjson.loads(text))


@given(
    columns=st.lists(
        st.tuples(good_messages, st.none() | texts, st.none() | st.integers(0, 2**63 - 1), json_values), min_size=1
    )
)
@settings(deadline=None, max_examples=50)
def test_rows_of_parquet_are_those_of_jsonl(columns, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "property.parquet"
    messages, labels, ids, metadata = zip(*columns, strict=True)
    texts_ = [json.dumps({"v": value}) for value in metadata]
    ids = pa.array(ids, pa.int64())
    pq.write_table(
        pa.table({"messages": messages, "label": pa.array(labels, pa.string()), "rollout_id": ids, "metadata": texts_}),
        path,
    )
    rows = [
        {"messages": json.loads(m), "label": label, "rollout_id": i, "metadata": json.loads(t)}
        for m, label, i, t in zip(messages, labels, ids.to_pylist(), texts_, strict=True)
    ]
    from_lines = parse_prompts("\n".join(map(json.dumps, rows)).encode(), "p")
    for have, want in zip(read_prompts(path), from_lines, strict=True):
        assert repr(want).replace(want.digest, "") == repr(have).replace(have.digest, "")


def test_rows_are_a_sequence_whose_members_share_nothing():
    rows = parse_prompts("\n".join(json.dumps({"messages": [USER], "label": str(k)}) for k in range(5)).encode(), "p")
    assert ["4", "3"] == [rows[-1].label, rows[-2].label]
    assert ["1", "2"] == [row.label for row in rows[1:3]]
    for position in (5, -6):
        with pytest.raises(IndexError):
            rows[position]
    rows[0].messages[0]["content"] = "changed"
    assert [USER] == rows[0].messages


def test_a_map_with_keys_that_are_no_text_is_refused(tmp_path):
    keys = pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64()))
    pq.write_table(pa.table({"messages": [json.dumps([USER])], "metadata": keys}), tmp_path / "p")
    with pytest.raises(BadPrompts, match="row 1: metadata has a key that is int, no text"):
        read_prompts(tmp_path / "p")


# Large files


def write_lines(path, n):
    """`n` rows whose text hardly repeats, so that packing does not help them much."""
    with path.open("w") as file:
        for k in range(n):
            noise = " ".join(hashlib.sha256(f"{k} {part}".encode()).hexdigest() for part in range(4))
            row = {"messages": [{"role": "user", "content": noise}], "label": str(k), "metadata": {"k": k}}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_is_a_fraction_of_the_file_whatever_the_rows(kind, tmp_path, monkeypatch):
    """20,000 rows, with the sizes that a million would reach scaled down as far."""
    monkeypatch.setattr(contents, "MEMORY_BYTES", 0)
    path = write_lines(tmp_path / "p.jsonl", 20_000)
    if kind == "parquet":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
        del rows
    size = path.stat().st_size
    monkeypatch.setattr("rollout.batch.promptrows.RowStore", lambda: RowStore(memory_bytes=size // 16))
    tracemalloc.start()
    rows = read_prompts(tmp_path / f"p.{kind}")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 20_000 == len(rows) and str(19_999) == rows[-1].label
    assert held < size / 4, "what a batch holds while it runs"
    assert peak < size / 2, "what checking takes beside it"


def test_a_large_file_has_the_hash_of_a_small_one_and_the_same_rows(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "p.jsonl", 50)
    small = read_prompts(path)
    monkeypatch.setattr(contents, "MEMORY_BYTES", 0)
    large = read_prompts(path)
    data, config = path.read_bytes(), make_config()
    assert list(small) == list(large) == list(parse_prompts(data, "p"))
    assert config_hash(config, data, "m") == config_hash(config, small.content, "m")
    assert config_hash(config, data, "m") == config_hash(config, large.content, "m")
    assert hashlib.blake2b(data, digest_size=32).hexdigest() == large.content.digest == small.content.digest


def test_the_config_hash_is_blake2b_over_parts_with_their_lengths(monkeypatch):
    """What batches that exist were planned with."""
    monkeypatch.setattr("rollout.batch.plan.IDENTITY_OPTIONS", ("seed",))
    monkeypatch.setattr("rollout.batch.plan.__version__", "v")
    assert blake2b_256(b'{"seed":0}', b"prompts", b"m", b"v").hex() == config_hash(make_config(), b"prompts", "m")


def test_a_large_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "MEMORY_BYTES", 0)
    path = write_lines(tmp_path / "p.jsonl", 3)
    rows = read_prompts(path)
    path.write_text(path.read_text().replace('"label": "1"', '"label": "7"'))
    with pytest.raises(BadPrompts, match="changed while it was read; run again"):
        config_hash(make_config(), rows.content, "m")
    assert ["0", "1", "2"] == [row.label for row in rows], "and the rows are those that were checked"


def test_content_of_a_pipe_is_read_once(tmp_path):
    read, write = os.pipe()
    os.write(write, b"{}\n")
    os.close(write)
    content = Content.of_file(Path(f"/dev/fd/{read}"), "pipe")
    os.close(read)
    assert [b"{}\n"] == list(content.chunks()) == list(content.chunks())


# Progress, threads, and a second look


def test_progress_is_shown_after_a_while_and_then_now_and_then(monkeypatch):
    now, shown = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    checked = paced(shown.append)
    for rows, at in [(1, 0.5), (2, 1.9), (3, 2.1), (4, 3.0), (5, 7.0), (6, 7.2), (7, 13.0)]:
        now[0] = at
        checked(rows)
    assert [3, 6, 7] == shown


async def test_prompts_are_checked_beside_the_event_loop(tmp_path):
    seen = []
    path = write_lines(tmp_path / "p.jsonl", 3000)
    options = {"prompts": str(path), "lake": str(tmp_path / "lake"), "batch_id": "b"}
    await prepare(options, RunOrigin.now(), checked=lambda rows: seen.append((rows, threading.current_thread())))
    assert [1024, 2048] == [rows for rows, _ in seen]
    assert threading.main_thread() not in {thread for _, thread in seen}


async def test_a_check_that_nobody_waits_for_ends(tmp_path):
    reached, seen = threading.Event(), []
    path = write_lines(tmp_path / "p.jsonl", 5000)

    def checked(rows):
        seen.append(rows)
        reached.set()
        time.sleep(0.2)

    options = {"prompts": str(path), "lake": str(tmp_path / "lake")}
    running = asyncio.create_task(prepare(options, RunOrigin.now(), checked=checked))
    assert await asyncio.to_thread(reached.wait, 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.get_running_loop().shutdown_default_executor()
    assert [1024] == seen


async def test_known_rows_are_taken_only_where_they_are_still_the_prompts(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", 20)
    options = {"prompts": str(path), "lake": str(tmp_path / "lake")}
    first = await prepare(options, RunOrigin.now())
    again = await prepare(options, RunOrigin.now(), known=first.rows)
    assert again.rows is first.rows and again.plan.config_hash == first.plan.config_hash
    tolerant = await prepare({**options, "skip_bad_prompts": True}, RunOrigin.now(), known=first.rows)
    assert tolerant.rows is not first.rows
    write_lines(path, 21)
    changed = await prepare(options, RunOrigin.now(), known=first.rows)
    assert 21 == len(changed.rows) and changed.plan.config_hash != first.plan.config_hash
