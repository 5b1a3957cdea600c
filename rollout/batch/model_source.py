"""A checkpoint under s3://bucket/prefix, fetched once into a folder on this machine.

    models/<digest>           a whole checkpoint, or with `weights` off its config and tokenizer alone
    models/.<digest>.part     one that is being fetched; no more than a leftover while nobody holds the lock
    models/.<digest>.lock     held (flock) by the process that fetches it, so a second one waits and finds it done

The digest is over where the objects are and over their names, sizes and ETags: an object that changes makes
another folder. A folder gets its final name by one rename, when every file in it is whole, checked and synced.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollout.batch.model_store import TEXT, ModelStore, Object
from rollout.engine.checkpoint import INDEX_FILE, WEIGHTS_FILE, read_checkpoint, read_config, weight_names
from rollout.errors import BadCheckpoint, BadConfig
from rollout.lake.store import sync_entry


def fetch_model(
    uri: str,
    models: Path,
    *,
    weights: bool = True,
    say: Callable[[str], None] | None = None,
    left: threading.Event | None = None,
) -> Path:
    """The folder with the checkpoint of `uri`; it is fetched if it is not there as the store has it now.

    Args:
        uri: s3://bucket or s3://bucket/prefix; files in folders below it are left alone.
        models: where fetched checkpoints are kept; made if it is not there.
        weights: without them only config and tokenizer are fetched, unless the whole is there already.
        say: told how far a long fetch is, from any thread.
        left: once it is set, the fetch gives up, raises and leaves nothing.

    Raises:
        BadConfig: no such URI, no rights, or an endpoint that does not answer.
        BadCheckpoint: nothing is there, a file is missing or broken, or it changed while it was fetched.
    """
    store = ModelStore(uri, say=say, left=left)
    listed = store.list()
    whole = models / _digest(store, listed)
    if _is_whole(whole, listed, weights=True):
        return whole
    wanted = listed if weights else {name: one for name, one in listed.items() if TEXT.fullmatch(name)}
    _require(uri, wanted, ["config.json", "tokenizer.json"] if weights else ["tokenizer.json"])
    folder = whole if weights else models / _digest(store, wanted)
    with _lock(models, folder.name, store):
        if not _is_whole(folder, wanted, weights=weights):
            with store.errors():
                _fetch(store, wanted, folder, weights=weights)
    return folder


def _digest(store: ModelStore, listed: Mapping[str, Object]) -> str:
    digest = hashlib.blake2b(f"{store.place}\x00".encode(), digest_size=16)
    for name, one in listed.items():
        digest.update(f"{name}\x00{one.size}\x00{one.etag}\x00".encode())
    return digest.hexdigest()


def _require(uri: str, there: Mapping[str, Object], needed: list[str]) -> None:
    missing = sorted(name for name in needed if name not in there)
    if missing:
        raise BadCheckpoint(f"model {uri} is half a checkpoint: {', '.join(missing)} missing")


def _texts(listed: Mapping[str, Object]) -> list[str]:
    """All but the weights themselves."""
    return [name for name in listed if not name.endswith(".safetensors")]


def _needed_weights(folder: Path, listed: Mapping[str, Object]) -> list[str]:
    """Names of the weight files that the index asks for: of a checkpoint in two formats only one is fetched."""
    return weight_names(folder / INDEX_FILE) if INDEX_FILE in listed else [WEIGHTS_FILE]


def _is_whole(folder: Path, listed: Mapping[str, Object], *, weights: bool) -> bool:
    """Whether all is there in full length: a folder that somebody thinned out is fetched anew."""
    try:
        names = _texts(listed) + (_needed_weights(folder, listed) if weights else [])
        return all((folder / name).stat().st_size == listed[name].size for name in names)
    except (OSError, KeyError, BadCheckpoint):
        return False


@contextmanager
def _lock(models: Path, name: str, store: ModelStore) -> Iterator[None]:
    """Hold the right to fetch one checkpoint. The kernel gives it up with the process, however that ends.

    Raises:
        BadConfig: the folder cannot be written.
    """
    try:
        models.mkdir(parents=True, exist_ok=True)
        held = os.open(models / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise BadConfig(f"{models}: {error.strerror}; choose another ROLLOUT_HOME") from error
    try:
        if not _locked(held):
            store.say(f"waiting for another process that fetches {store.uri}")
            while not _locked(held):
                store.pause()
        yield
    finally:
        os.close(held)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fetch(store: ModelStore, listed: Mapping[str, Object], folder: Path, *, weights: bool) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a fetch that was killed
    part.mkdir()
    try:
        store.get({name: listed[name] for name in _texts(listed)}, part)
        if weights:
            read_config(part)  # what the engine cannot serve is refused before its gigabytes are fetched
            names = _needed_weights(part, listed)
            _require(store.uri, listed, names)
            store.get({name: listed[name] for name in names}, part)
            read_checkpoint(part)
        now = store.list()
        if any(now.get(name) != one for name, one in listed.items()):
            raise BadCheckpoint(f"model {store.uri} changed while it was fetched; run again when it is whole")
        _sync(part)
        shutil.rmtree(folder, ignore_errors=True)  # only where a file of it was missing or short
        part.rename(folder)
        sync_entry(folder.parent)
    except BadCheckpoint as error:
        raise BadCheckpoint(str(error).replace(str(part), f"model {store.uri}")) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        sync_entry(path)
    sync_entry(folder)
