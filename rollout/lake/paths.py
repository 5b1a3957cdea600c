"""The layout under one lake URI, and the check that work may start there.

tables/<table>/         Delta tables
staging/<batch_id>/     plan.json, data/, shards/<shard>.json
quarantine/<batch_id>/  what failed its check, with report.json
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rollout.config import BATCH_ID_PATTERN
from rollout.errors import BadConfig, BadLake
from rollout.lake.schema import TABLE_NAMES, TableName
from rollout.lake.store import LocalStore, S3Store, Store

S3_SCHEME = "s3://"
"""How a URI of an object store begins."""

Area = Literal["staging", "quarantine"]

_BAD_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\*?\[\]]")
"""In a local path: the Delta reader fails on control characters and backslashes, Polars expands the others."""

_S3_OPTIONS = {
    "aws_endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "aws_access_key_id": ("AWS_ACCESS_KEY_ID",),
    "aws_secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "aws_session_token": ("AWS_SESSION_TOKEN",),
    "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}


def s3_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Storage options of deltalake and Polars from the AWS variables of `environment`; what is unset is left out."""
    options = {}
    for name, variables in _S3_OPTIONS.items():
        values = [environment[v] for v in variables if environment.get(v)]
        if values:
            options[name] = values[0]
    if options.get("aws_endpoint_url", "").startswith("http://"):
        options["aws_allow_http"] = "true"
    return options


class LakePaths:
    """One lake: its URI, its store and the names of everything in it.

    Args:
        uri: a local path (`~`, relative, file://) or s3://bucket/prefix.
        storage_options: for S3, in deltalake's names; default: the AWS variables of the environment.

    Raises:
        BadLake: a URI of another kind, or a local path that the readers cannot open.
    """

    def __init__(self, uri: str | Path, storage_options: dict[str, str] | None = None) -> None:
        text = str(uri)
        self.is_local = not text.startswith(S3_SCHEME)
        self.store: Store
        if self.is_local:
            self.root = str(_local_root(text))
            self.storage_options: dict[str, str] = {}
            self.store = LocalStore(Path(self.root))
        else:
            prefix = text.removeprefix(S3_SCHEME).strip("/")
            if not prefix or "//" in prefix or ".." in prefix.split("/"):
                raise BadLake(f"lake {text!r}: give s3://bucket/prefix")
            self.root = f"s3://{prefix}"
            self.storage_options = s3_options(os.environ) if storage_options is None else storage_options
            self.store = S3Store(prefix, self.storage_options)
        self.uri = self.root

    def __repr__(self) -> str:
        return f"LakePaths({self.uri!r})"

    def table_key(self, name: TableName) -> str:
        return f"tables/{name}"

    def table_uri(self, name: TableName) -> str:
        """Where deltalake and Polars find the table."""
        return f"{self.root}/{self.table_key(name)}"

    def folder(self, batch_id: str, area: Area = "staging") -> str:
        """Key of a batch's folder outside the tables.

        Raises:
            BadConfig: the id does not match the pattern of batch ids.
        """
        return f"{area}/{check_batch_id(batch_id)}"

    def plan_key(self, batch_id: str) -> str:
        return f"{self.folder(batch_id)}/plan.json"

    def check_writable(self) -> None:
        """Find out before any work whether a batch could be written here. Creates the lake's folder.

        Files of others beside the lake's are left alone.

        Raises:
            BadLake: not writable, a file is in the way, or a folder under tables/ is no Delta table.
        """
        self.check_nothing_in_the_way()
        try:
            self.store.probe()
        except BadLake:
            raise
        except Exception as error:  # botocore's errors share no base class with OSError
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise BadLake(f"lake {self.uri} is not writable: {reason}; choose another --lake") from error
        for name in TABLE_NAMES:
            found = self.store.names(self.table_key(name))
            if found and "_delta_log" not in found:
                raise BadLake(
                    f"lake {self.uri}: tables/{name} holds files but is no Delta table; choose another --lake"
                )

    def check_nothing_in_the_way(self) -> None:
        """Find a file where a local lake needs a folder. Creates nothing.

        Raises:
            BadLake: there is one.
        """
        if not self.is_local:
            return
        folders = ["", "staging", "quarantine", "tables", *(self.table_key(name) for name in TABLE_NAMES)]
        for folder in folders:
            path = Path(self.root, folder)
            there = next(part for part in (path, *path.parents) if part.exists())
            if not there.is_dir():
                raise BadLake(f"lake {self.uri}: {there} is a file; choose another --lake")


def check_batch_id(batch_id: str) -> str:
    """The batch id itself.

    Raises:
        BadConfig: it does not match the pattern (so it could also leave the lake's folders).
    """
    if not BATCH_ID_PATTERN.fullmatch(batch_id):
        raise BadConfig(f"batch id {batch_id!r} does not match {BATCH_ID_PATTERN.pattern}")
    return batch_id


def _local_root(text: str) -> Path:
    if "://" in text and not text.startswith("file://"):
        raise BadLake(f"lake {text!r}: give a local path or s3://bucket/prefix")
    path = text.removeprefix("file://")
    if not path.strip():
        raise BadLake("lake: the path is empty")
    if _BAD_CHARACTERS.search(path):
        raise BadLake(f"lake {path!r}: control characters and any of \\ * ? [ ] are not allowed in the path")
    return Path(os.path.abspath(os.path.expanduser(path)))
