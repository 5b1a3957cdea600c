"""Prompts: read once, row by row, and refused with file and line before anything runs.

A row is `{messages, tools?, label?, metadata?, agent?, rollout_id?}`. It comes from JSONL, parquet, a Delta table
or a dataset that Hugging Face `datasets` saved to disk. In all but JSONL, nested columns may be nested types
(null fields are taken as absent) or JSON text. What a batch's config hash is over: a file's bytes; for a table or
a dataset its rows, each as JSON with absent and null fields left out, so that compacting a table changes nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from rollout.batch.content import Content
from rollout.batch.promptfiles import Source, file_source
from rollout.batch.promptparse import ROW_KEYS
from rollout.batch.promptrow import RowRefused, check_sampling
from rollout.batch.promptrows import DIGEST_BYTES, PromptRow, PromptRows
from rollout.batch.prompttables import folder_source
from rollout.config import DEMO_PROMPTS
from rollout.errors import BadPrompts
from rollout.lake.paths import S3_SCHEME
from rollout.row_sampling import Bounds

__all__ = ["ROW_KEYS", "Checked", "PromptRow", "PromptRows", "paced", "parse_prompts", "prompt_bytes", "read_prompts"]

Checked = Callable[[int], None]
"""Called now and then while prompts are checked, with the rows so far; what it raises ends the check."""

_CHECKED_EVERY = 1024


def read_prompts(
    path: str | Path,
    *,
    skip_bad: bool = False,
    bounds: Bounds | None = None,
    checked: Checked | None = None,
    known: PromptRows | None = None,
) -> PromptRows:
    """The rows of a prompt file, a Delta table or a saved dataset; `demo` is the file that ships with the package.

    Args:
        bounds: what rows may set in metadata.sampling (rollout.row_sampling); null: nothing.
        known: rows read before; they are the result if they are still what `path` holds.

    Raises:
        BadPrompts: one line with file and line number; with `skip_bad` only for the file as a whole.
    """
    source = _source(path)
    given = (source.name, source.fingerprint, skip_bad, bounds)
    if known is not None and given == (known.name, known.fingerprint, known.skip_bad, known.bounds):
        return known
    return _check(source, skip_bad=skip_bad, bounds=bounds, checked=checked)


def _source(path: str | Path) -> Source:
    name = str(path)
    if name == DEMO_PROMPTS:
        return file_source(Content.of(prompt_bytes(name), name), name)
    if name.startswith(S3_SCHEME) or not Path(name).expanduser().is_file():
        folder = folder_source(name)
        if folder is not None:
            return folder
    return file_source(Content.of_file(Path(name).expanduser(), name), name)


def prompt_bytes(path: str | Path) -> bytes:
    """A prompt file's bytes.

    Raises:
        BadPrompts: it cannot be read.
    """
    where = Path(__file__).with_name("demo.jsonl") if str(path) == DEMO_PROMPTS else Path(path).expanduser()
    with Content.of_file(where, str(path)).open() as file:
        return file.read()


def parse_prompts(data: bytes, name: str | Path, *, skip_bad: bool = False, bounds: Bounds | None = None) -> PromptRows:
    """The rows of a prompt file's bytes; errors as `read_prompts`, with `name` for the file."""
    return _check(file_source(Content.of(data, str(name)), str(name)), skip_bad=skip_bad, bounds=bounds, checked=None)


def _check(source: Source, *, skip_bad: bool, bounds: Bounds | None, checked: Checked | None) -> PromptRows:
    name, unit = source.name, source.unit
    rows = PromptRows(name=name, unit=unit, fingerprint=source.fingerprint, skip_bad=skip_bad, bounds=bounds)
    for given in source.rows:
        try:
            row, text = given.parse()
            check_sampling(row, bounds)
        except RowRefused as error:
            if not skip_bad:
                raise BadPrompts(f"{name}, {unit} {given.line}: {error}") from error
            rows.add_refused(given.line, _digest(given.raw()), f"{unit} {given.line}: {error}")
        else:
            rows.add(given.line, _digest(given.raw() if source.content else text), row, text)
        if checked is not None and len(rows) % _CHECKED_EVERY == 0:
            checked(len(rows))
    rows.close(source.content)
    if not rows:
        raise BadPrompts(f"{name}: no prompts in it")
    if rows.n_refused == len(rows):
        raise BadPrompts(f"{name}: every row is refused, the first because of {rows[0].refused}")
    return rows


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=DIGEST_BYTES).digest()


def paced(show: Checked, *, first_s: float = 2.0, every_s: float = 5.0) -> Checked:
    """`show` as it can be called for every thousand rows: not before `first_s` seconds, then every `every_s`."""
    due = time.monotonic() + first_s

    def checked(rows: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + every_s
            show(rows)

    return checked
