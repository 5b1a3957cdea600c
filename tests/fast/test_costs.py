"""What a batch cost: known times price, and null wherever one of the two is not known."""

import pytest
from lake_batch import plan_batch
from made_summary import make_summary

from rollout.batch import costs
from rollout.batch.costs import Costs, batch_costs, held_gpus, value_text
from rollout.batch.prepare import Batch
from rollout.batch.progress import BatchProgress
from rollout.config import make_config
from rollout.errors import BadConfig
from rollout.lake.paths import LakePaths

EXTERNAL = {"engine": "external", "engine_url": "http://127.0.0.1:1"}
ON_EIGHT = {**EXTERNAL, "engine_gpus": 8}
NOTHING = dict.fromkeys(("gpu_seconds", "tokens_per_gpu_second", "cost", "cost_per_trained_token"))


def batch_of(**options) -> Batch:
    return Batch(LakePaths("lake"), make_config(**options), plan_batch(**options), [])


def test_gpu_seconds_are_time_held_times_gpus_and_the_rest_follows():
    found = batch_costs(make_summary(), batch_of(**ON_EIGHT, gpu_price_per_hour=5.0), 90.0)
    expected = Costs(
        seconds_held=90.0,
        gpu_seconds=720.0,
        tokens_per_gpu_second=10.0,
        cached_share=0.25,
        cost=1.0,
        cost_per_trained_token=0.0025,
    )
    assert expected == found


def test_without_a_price_there_is_no_cost():
    found = batch_costs(make_summary(), batch_of(**ON_EIGHT), 90.0)
    assert (720.0, None, None) == (found.gpu_seconds, found.cost, found.cost_per_trained_token)


def test_what_depends_on_unknown_gpus_or_an_earlier_runs_time_is_null():
    unknown = batch_costs(make_summary(), batch_of(**EXTERNAL, gpu_price_per_hour=4.5), 90.0)
    assert {"seconds_held": 90.0, "cached_share": 0.25, **NOTHING} == unknown.to_json()
    resumed = batch_of(**ON_EIGHT, gpu_price_per_hour=4.5)
    resumed.planned = True
    assert {"seconds_held": None, "cached_share": 0.25, **NOTHING} == batch_costs(
        make_summary(), resumed, 90.0
    ).to_json()


def test_how_long_ray_held_its_nodes_is_not_known():
    found = batch_costs(make_summary(), batch_of(**ON_EIGHT, gpu_price_per_hour=4.5, task_runner="ray"), 90.0)
    assert {"seconds_held": None, "cached_share": 0.25, **NOTHING} == found.to_json()


def test_nothing_is_divided_by_zero():
    empty = make_summary(tokens_prompt=0, tokens_trained=0)
    found = batch_costs(empty, batch_of(gpu_price_per_hour=4.5), 90.0)
    assert (0.0, 0.0) == (found.gpu_seconds, found.cost)
    assert (None, None, None) == (found.tokens_per_gpu_second, found.cached_share, found.cost_per_trained_token)


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({}, 0),
        ({"engine_gpus": 1}, 1),
        (EXTERNAL, None),
        ({**EXTERNAL, "engine_gpus": 0}, 0),
        ({"engine": "sglang", "engine_recipe": "tiny_cpu"}, 0),
        ({"engine": "sglang", "engine_recipe": "qwen3_8b_h200"}, 3),
        ({"engine": "sglang", "engine_recipe": "qwen3_8b_h200", "engine_gpus": 2}, 2),
        ({"engine": "sglang", "engine_recipe": "qwen3_8b_h200", "task_runner": "ray"}, None),
    ],
)
def test_gpus_are_what_was_said_else_what_is_started_here(monkeypatch, options, gpus):
    monkeypatch.setattr(costs, "host_gpus", lambda: ["0", "1", "2"])
    assert gpus == held_gpus(make_config(**options))


@pytest.mark.parametrize("given", [{"engine_gpus": -1}, {"gpu_price_per_hour": -0.5}, {"gpu_price_per_hour": "nan"}])
def test_values_out_of_bounds_are_refused_by_name(given):
    with pytest.raises(BadConfig, match=next(iter(given))):
        make_config(**given)


def test_time_held_is_summed_also_where_the_block_fails():
    progress = BatchProgress()
    for _ in range(2):
        with pytest.raises(OSError), progress.holding():
            raise OSError
    assert 0 < progress.seconds_held < 1


def test_a_price_of_a_millionth_is_not_shown_as_nothing():
    assert ("2.25e-06", "1234.5", None) == (value_text(0.00000225), value_text(1234.5), value_text(None))
