"""What a batch took of its GPUs, and what that cost. Null is what is not known; nothing is guessed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from rollout.batch.prepare import Batch
from rollout.config import BatchConfig
from rollout.engine.environment import host_gpus, share_gpus
from rollout.engine.recipes import find_recipe

if TYPE_CHECKING:  # it brings openai, and `rollout show` reads costs
    from rollout.batch.summary import Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Columns of the batches table.

    seconds_held            from the start of the engines to their release, starting and live parity included
    gpu_seconds             seconds_held times the GPUs held; engines that batches share count whole for each
    tokens_per_gpu_second   sampled tokens by gpu_seconds
    cached_share            prompt tokens that the engines took from their prefix caches, 0 to 1
    cost                    gpu_seconds at `gpu_price_per_hour`, in the currency of that price
    cost_per_trained_token  cost by tokens_trained
    """

    seconds_held: float | None
    gpu_seconds: float | None
    tokens_per_gpu_second: float | None
    cached_share: float | None
    cost: float | None
    cost_per_trained_token: float | None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


COSTS = tuple(field.name for field in fields(Costs))


def value_text(value: float | None) -> str | None:
    """A cost as a person reads it: six digits, whatever its size."""
    return None if value is None else f"{value:.6g}"


def batch_costs(summary: Summary, batch: Batch, seconds_held: float) -> Costs:
    """What a batch cost whose run held its engines for `seconds_held`.

    Of a batch that an earlier run had begun, that run's time is not known, nor what depends on it; no more is that of
    engines on Ray's nodes.
    """
    held = None if batch.planned or batch.config.task_runner == "ray" else seconds_held
    gpus, price = held_gpus(batch.config), batch.config.gpu_price_per_hour
    gpu_seconds = None if gpus is None or held is None else gpus * held
    cost = None if gpu_seconds is None or price is None else gpu_seconds / 3600.0 * price
    return Costs(
        seconds_held=held,
        gpu_seconds=gpu_seconds,
        tokens_per_gpu_second=_ratio(summary.tokens_sampled, gpu_seconds),
        cached_share=_ratio(summary.tokens_cached, summary.tokens_prompt),
        cost=cost,
        cost_per_trained_token=_ratio(cost, summary.tokens_trained),
    )


def held_gpus(config: BatchConfig) -> int | None:
    """GPUs that the batch's engines hold: `engine_gpus`, else what is known of engines that are started here.

    Raises:
        BadConfig: this host has too few for the recipe.
    """
    if config.engine_gpus is not None:
        return config.engine_gpus
    if config.engine == "sglang" and config.task_runner == "local":
        return sum(map(len, share_gpus(find_recipe(str(config.engine_recipe)), host_gpus())))
    return 0 if config.engine == "embedded" else None


def _ratio(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by
