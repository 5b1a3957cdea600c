"""What rows must hold among each other before they are staged or published, and their order; schemas cannot say it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rollout.errors import ParityFailed
from rollout.lake.planfile import Plan, ShardPlan
from rollout.lake.schema import TableName
from rollout.sample import InvalidSample

_RESPONSE_LISTS = ("loss_mask", "rollout_log_probs")
_TOKEN_LISTS = ("tokens", *_RESPONSE_LISTS)
_SORT_KEYS: dict[TableName, tuple[str, ...]] = {
    "samples": ("group_index", "rollout_key", "sibling"),
    "trajectories": ("index", "attempt", "session_id", "seq"),
}


def check_samples(samples: pa.Table, batch_id: str, cut: ShardPlan) -> None:
    """Refuse a shard whose rows contradict themselves or the plan.

    Every per-token list has response_length entries, or (tokens) at least as many; no reward is NaN; every
    planned index is there, in rows of one rollout_key, numbered 0..siblings-1.

    Raises:
        InvalidSample: naming the rollout_key and the field.
    """
    keys = samples.column("rollout_key").to_numpy()
    check_constant(samples, "batch_id", batch_id)
    check_constant(samples, "shard", cut.shard)
    for name in _TOKEN_LISTS:
        holes = np.concatenate([_element_nulls(chunk) for chunk in samples.column(name).chunks] or [np.zeros(0, bool)])
        _refuse(holes, keys, f"{name}: an element is null")
    wanted = samples.column("response_length").to_numpy()
    lengths = {name: pc.list_value_length(samples.column(name)).to_numpy() for name in _TOKEN_LISTS}
    for name in _RESPONSE_LISTS:
        _refuse(lengths[name] != wanted, keys, f"{name}: its length is not response_length")
    _refuse((wanted < 0) | (wanted > lengths["tokens"]), keys, "response_length: not within the tokens")
    nan = pc.is_nan(samples.column("reward")).fill_null(False).to_numpy()
    _refuse(nan, keys, "reward: NaN is no reward; use null")
    _check_rollouts(samples, keys, cut)


def _element_nulls(chunk: pa.Array) -> NDArray[np.bool_]:
    if chunk.flatten().null_count == 0:
        return np.zeros(len(chunk), bool)
    return np.array([value.values.null_count > 0 for value in chunk])


def check_constant(table: pa.Table, name: str, value: object) -> None:
    """Refuse a table in which column `name` holds anything but `value`.

    Raises:
        InvalidSample: naming what it holds.
    """
    found = table.column(name).unique().to_pylist()
    wrong = [item for item in found if item != value]
    if wrong:
        raise InvalidSample(f"{name}: {wrong[0]!r} in the rows of {value!r}")


def _refuse(bad: NDArray[np.bool_], keys: NDArray[np.int64], problem: str) -> None:
    if bad.any():
        raise InvalidSample(f"rollout_key {keys[np.flatnonzero(bad)[0]]}: {problem}")


def _check_rollouts(samples: pa.Table, keys: NDArray[np.int64], cut: ShardPlan) -> None:
    indexes = samples.column("index").to_numpy()
    sibling, siblings = samples.column("sibling").to_numpy(), samples.column("siblings").to_numpy()
    missing = sorted(set(cut.indexes) - set(indexes.tolist()))
    if missing:
        raise InvalidSample(
            f"shard {cut.shard}: {len(missing)} planned rollouts have no row (first index {missing[0]})"
        )
    foreign = sorted(set(indexes.tolist()) - set(cut.indexes))
    if foreign:
        raise InvalidSample(f"index {foreign[0]} is not of shard {cut.shard}")
    order = np.lexsort((sibling, keys))
    keys, indexes, sibling, siblings = keys[order], indexes[order], sibling[order], siblings[order]
    first = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    counts = np.diff(np.append(first, len(keys)))
    position = np.arange(len(keys)) - np.repeat(first, counts)
    _refuse(sibling != position, keys, "sibling: not 0, 1, 2... once each")
    _refuse(siblings != np.repeat(counts, counts), keys, "siblings: not the number of its rows")
    _refuse(indexes != np.repeat(indexes[first], counts), keys, "rows of two indexes share this key")
    if len(first) != cut.n_rollouts:
        raise InvalidSample(f"shard {cut.shard}: {len(first)} rollout_keys for {cut.n_rollouts} rollouts")


def check_trajectories(trajectories: pa.Table, batch_id: str, cut: ShardPlan) -> None:
    """Refuse a tape of another batch or shard, two exchanges under one number, or one without its session's row.

    Raises:
        InvalidSample: naming the index.
    """
    check_constant(trajectories, "batch_id", batch_id)
    indexes, seq = trajectories.column("index").to_numpy(), trajectories.column("seq").to_numpy()
    foreign = sorted(set(indexes.tolist()) - set(cut.indexes))
    if foreign:
        raise InvalidSample(f"trajectories: index {foreign[0]} is not of shard {cut.shard}")
    order = np.lexsort((seq, indexes))
    indexes, seq = indexes[order], seq[order]
    twice = np.flatnonzero((np.diff(indexes) == 0) & (np.diff(seq) == 0))
    if len(twice):
        raise InvalidSample(f"trajectories: index {indexes[twice[0]]} has two rows with seq {seq[twice[0]]}")
    first = np.flatnonzero(np.diff(indexes, prepend=indexes[:1] - 1))
    headless = first[seq[first] != -1]
    if len(headless):
        raise InvalidSample(f"trajectories: index {indexes[headless[0]]} lacks its session's row (seq -1)")


def check_verdicts(parity: pa.Table, plan: Plan) -> None:
    """Refuse to publish a batch unless each planned rollout has its one replay verdict, and none differs, live too.

    Raises:
        ValueError: rows of another batch, or a rollout without its one verdict.
        ParityFailed: a verdict is `differs`; the batch belongs into quarantine.
    """
    check_constant(parity, "batch_id", plan.batch_id)
    replays = parity.filter(pc.equal(parity.column("check"), "replay"))
    indexes = replays.column("index").to_numpy()
    if not np.array_equal(np.sort(indexes), np.arange(plan.n_rollouts)):
        raise ValueError(
            f"parity: {len(indexes)} verdicts on {len(np.unique(indexes))} rollouts, "
            f"batch {plan.batch_id} has {plan.n_rollouts}"
        )
    differing = parity.column("index").to_numpy()[parity.column("verdict").to_numpy() == "differs"]
    if len(differing):
        raise ParityFailed(
            f"parity: {len(differing)} of {plan.n_rollouts} rollouts differ (first index {differing[0]})"
        )


def sorted_rows(table: pa.Table, name: TableName) -> NDArray[np.int64]:
    """Positions of a table's rows in the order in which its files have them."""
    keys = [(column, "ascending") for column in _SORT_KEYS[name]]
    return np.asarray(pc.sort_indices(table.select(list(_SORT_KEYS[name])), sort_keys=keys), np.int64)
