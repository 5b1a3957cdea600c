"""`rollout show` and `rollout parity`: batches, groups, samples and verdicts as tables, or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.batch.costs import COSTS, value_text
from rollout.batch.spool import SPOOLS
from rollout.batch.view import PLANNED, BatchView, find_sample, list_batches, view_batch
from rollout.errors import BadInput
from rollout.home import state_home

GROUP_COLUMNS = ["group_index", "index", "sibling", "prompt", "status", "reward", "failure"]
SAMPLE_COLUMNS = ["group_index", "sample_id", "rollout_key", "rollout_id", "sibling", "status", "reward"]
SAMPLE_COLUMNS += ["turns", "response_length", "agent", "failure"]
PARITY_COLUMNS = ["index", "rollout_key", "check", "verdict", "reason", "paths"]
CHECKS = ("replay", "live", "cross_engine")


def _view(lake: str, batch_id: str) -> BatchView:
    return view_batch(lake, batch_id, state_home() / SPOOLS)


def show_batches(lake: str, *, limit: int, as_json: bool) -> None:
    """List the lake's newest batches."""
    rows = list_batches(lake, state_home() / SPOOLS)
    if as_json:
        return _print_json({"batches": rows})
    if not rows:
        raise BadInput(f"no batch in {lake} yet: `rollout run --lake {lake}` makes one")
    shown = rows[-limit:]
    columns = ["batch_id", "status", "n_prompts", "n_rollouts", "reward_mean", "created_at"]
    _print_table(columns, [[_cell(row[name]) for name in columns] for row in shown], of=len(rows))


def show_batch(lake: str, batch_id: str, *, limit: int, as_json: bool) -> None:
    """Show one batch: its facts, and a line per group."""
    view = _view(lake, batch_id)
    groups, facts = _groups(view), {**_facts(view), **_progress(view)}
    if as_json:
        return _print_json({**facts, "groups": groups})
    text = _as_text(view, facts)
    width = max(17, *map(len, text))
    for name, value in text.items():
        print(f"{name:<{width}} {_cell(value)}")
    if not groups:
        return
    columns = ["group", "prompt", "rollouts", "samples", "mean reward", "rewards", "status"]
    lines = [[_cell(group[name.replace(" ", "_")]) for name in columns] for group in groups[:limit]]
    _print_table(columns, lines, of=len(groups))
    print(f"\n`rollout show {batch_id} --group N` lists a group's samples, `--sample ID` prints one.")


def show_group(lake: str, batch_id: str, group: int, *, limit: int, as_json: bool) -> None:
    """List one group's samples."""
    view = _view(lake, batch_id)
    frame = view.samples(SAMPLE_COLUMNS)
    rows = frame.filter(pl.col("group_index") == group).drop("group_index").to_dicts() if frame.width else []
    if not rows:
        raise BadInput(f"batch {batch_id} has no rows of group {group}")
    if as_json:
        return _print_json({"batch_id": batch_id, "group": group, "samples": rows})
    columns = list(rows[0])
    lines = [[row["sample_id"][:12], *(_cell(row[name]) for name in columns[1:])] for row in rows[:limit]]
    _print_table(columns, lines, of=len(rows))


def show_sample(lake: str, batch_id: str, name: str, *, as_json: bool) -> None:
    """Print one sample's conversation, token by token."""
    from flows.conversation import print_sample

    view = _view(lake, batch_id)
    sample = find_sample(view, name)
    if as_json:
        return _print_json(sample)
    print_sample(sample, config=view.plan.config if view.plan else {})


def show_parity(lake: str, batch_id: str, *, limit: int, as_json: bool) -> bool:
    """Show a batch's verdicts, replayed and live; True if a rollout differs. What is only staged is checked here.

    Comparisons with other engines are counted and are no reason to say that the batch differs.
    """
    view = _view(lake, batch_id)
    known = view.parity()
    rows = (_check_here(view) if known is None else known).select(PARITY_COLUMNS)
    verdicts = {check: _verdicts(rows, check) for check in CHECKS}
    own = rows.filter(pl.col("check") != "cross_engine")
    differing = own.filter(pl.col("verdict") == "differs").to_dicts()
    if as_json:
        reasons = own.filter(pl.col("reason").is_not_null()).drop("paths").to_dicts()
        counts = {"verdicts": verdicts["replay"], "live": verdicts["live"], "cross_engine": verdicts["cross_engine"]}
        _print_json({**_facts(view), **counts, "differing": differing, "reasons": reasons})
        return bool(differing)
    for check, counted in verdicts.items():
        if check == "replay" or counted:
            name = f"{batch_id} ({view.status})" if check == "replay" else check.replace("_", "-")
            print(f"{name}: " + (", ".join(f"{k} {n}" for k, n in counted.items()) or "no verdicts"))
            _print_reasons(rows.filter(pl.col("check") == check))
    for row in differing[:limit]:
        live = "live, " if row["check"] == "live" else ""
        print(f"rollout {row['index']} (rollout_key {row['rollout_key']}): {live}{row['reason'] or 'differs'}")
        for path in row["paths"] or []:
            print(f"  {path}")
    if len(differing) > limit:
        print(f"... and {len(differing) - limit} more (--limit)")
    return bool(differing)


def _verdicts(rows: pl.DataFrame, check: str) -> dict[str, int]:
    counts = rows.filter(pl.col("check") == check).group_by("verdict").len().sort("verdict")
    return dict(zip(counts["verdict"].to_list(), counts["len"].to_list(), strict=True))


def show_installed(*, as_json: bool) -> None:
    """List the installed parts; those that cannot be used come last, each with its reason."""
    from rollout.installed import installed_parts  # imports every part's module, which takes a while

    parts = installed_parts()
    if as_json:
        return _print_json({"parts": [part.to_json() for part in parts]})
    columns = ["kind", "name", "package", "target", "needs"]
    usable = [part for part in parts if part.problem is None]
    lines = [[_cell(getattr(part, name)) for name in columns] for part in usable]
    _print_table(columns, lines, of=len(lines))
    for part in parts:
        if part.problem is not None:
            print(f"\ncannot be used: {part.problem}")


def _print_reasons(rows: pl.DataFrame) -> None:
    kinds = rows.filter(pl.col("reason").is_not_null()).with_columns(kind=pl.col("reason").str.split(":").list.first())
    counted = kinds.group_by("verdict", "kind").len().sort("verdict", "kind")
    for verdict, kind, n in counted.iter_rows():
        print(f"  {verdict}, {kind}: {n}")


def _check_here(view: BatchView) -> pl.DataFrame:
    from rollout.batch.check import check_shard, job_of
    from rollout.batch.model import tokenizer_directory
    from rollout.config import make_config
    from rollout.lake.staging import staged_shards

    assert view.plan is not None
    config = make_config(**{**view.plan.config, "lake": view.paths.uri})
    shards = staged_shards(view.paths, view.batch_id)
    if not shards:
        raise BadInput(
            f"batch {view.batch_id} has no staged shard yet: `rollout run --batch-id {view.batch_id}` goes on"
        )
    tokenizer = tokenizer_directory(config.model)
    tables = [check_shard(job_of(config, view.plan, shard, tokenizer)).parity for shard in shards]
    return pl.concat([pl.DataFrame(table) for table in tables])


def _facts(view: BatchView) -> dict[str, Any]:
    plan, row = view.plan, view.row or {}
    config = plan.config if plan else json.loads(row.get("config") or "{}")
    return {
        "batch_id": view.batch_id,
        "status": view.status,
        "lake": view.paths.uri,
        "created_at": row.get("created_at") or (plan.created_at if plan else None),
        "config_hash": plan.config_hash if plan else row.get("config_hash"),
        "policy_version": config.get("policy_version"),
        "n_prompts": plan.n_prompts if plan else row.get("n_prompts"),
        "n_rollouts": plan.n_rollouts if plan else row.get("n_rollouts"),
        "reward_mean": row.get("reward_mean"),
        **({} if view.row is None else {name: row.get(name) for name in COSTS}),
    }


def _progress(view: BatchView) -> dict[str, Any]:
    """How far a batch is that nothing is decided about; empty for any other."""
    if not view.undecided or view.plan is None:
        return {}
    frame = view.samples(["index", "reward", "failure"])
    rollouts = frame.unique("index", keep="first") if frame.width else frame
    failures = [row["type"] for row in rollouts["failure"].to_list() if row] if frame.width else []
    return {
        "running": view.running,
        "shards": len(view.plan.shards),
        "shards_staged": len(view.staged),
        "rollouts_finished": view.rollouts_finished,
        "rollouts_spooled": view.rollouts_spooled,
        "failures": dict(sorted(Counter(failures).items())),
        "reward_mean": rollouts["reward"].mean() if frame.width else None,
    }


def _as_text(view: BatchView, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts as a person reads them."""
    text = {name: value_text(value) if name in COSTS else value for name, value in facts.items()}
    if view.undecided and view.plan is not None:
        del text["running"], text["shards"], text["rollouts_spooled"]
        text["status"] = _status_text(view)
        text["shards_staged"] = f"{len(view.staged)} of {len(view.plan.shards)}"
        spooled = f" ({view.rollouts_spooled} of them in this machine's spools)" if view.rollouts_spooled else ""
        text["rollouts_finished"] = f"{view.rollouts_finished} of {view.plan.n_rollouts}{spooled}"
        text["failures"] = ", ".join(f"{kind} {n}" for kind, n in facts["failures"].items()) or "none"
    return text


def _status_text(view: BatchView) -> str:
    status = "planned, nothing staged yet" if view.status == PLANNED else view.status
    if view.running:
        return f"{status} (a process of this machine holds its spools)"
    if view.plan is not None and len(view.staged) == len(view.plan.shards):
        return f"{status}; checked and published at this moment, or by `rollout run --batch-id {view.batch_id}`"
    seen = "no process of this machine is seen" if view.running is False else "this system does not say whether one is"
    return f"{status}; {seen} running it, `rollout run --batch-id {view.batch_id}` goes on"


def _groups(view: BatchView) -> list[dict[str, Any]]:
    frame = view.samples(GROUP_COLUMNS)
    if not frame.width:
        return []
    groups = []
    for (group,), rows in frame.group_by("group_index", maintain_order=True):
        rollouts = rows.unique("index", keep="first", maintain_order=True)
        rewards = rollouts["reward"].to_list()
        statuses = rollouts.group_by("status").len().sort("status").iter_rows()
        groups.append(
            {
                "group": group,
                "prompt": _last_user_text(rows["prompt"][0]),
                "rollouts": rollouts.height,
                "samples": rows.height,
                "mean_reward": rollouts["reward"].mean(),
                "rewards": rewards,
                "status": ", ".join(f"{status} {n}" for status, n in statuses),
            }
        )
    return groups


def _last_user_text(prompt: str) -> str:
    for message in reversed(json.loads(prompt)):
        if message.get("role") == "user":
            content = message.get("content") or ""
            text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
            return " ".join(text.split())
    return ""


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return " ".join("-" if item is None else f"{item:g}" for item in value)
    if isinstance(value, dict):
        return str(value.get("type"))
    return f"{value:%Y-%m-%d %H:%M:%S}" if hasattr(value, "hour") else str(value)


def _print_table(columns: list[str], lines: list[list[str]], *, of: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=48 if column == "prompt" else None)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    console = Console()
    # Nothing is folded or cut where the output is a file.
    console = console if console.is_terminal else Console(width=200)
    console.print(table)
    if of > len(lines):
        print(f"... {of - len(lines)} more (--limit)")


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, default=str, ensure_ascii=False))
