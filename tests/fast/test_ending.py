"""What Prefect's UI shows of a batch that ended: lists that end, bins that hold everything, one difference in full."""

from base64 import b64decode
from xml.etree import ElementTree

import polars as pl
import pytest
from lake_batch import parity_rows, plan_batch
from made_summary import make_summary

from rollout.batch.costs import Costs
from rollout.batch.ending import Ending
from rollout.batch.figures import MOST_ROWS, distributions, group_rows, length_bins, reward_bins
from rollout.batch.prepare import Batch
from rollout.batch.verdicts import verdict_chart, verdict_text
from rollout.config import make_config
from rollout.lake.paths import LakePaths
from rollout.lake.schema import rows_to_table
from rollout.markdown import table

BITS = "sample[1].rollout_log_probs[17]: 0xbfe0000000000000 (-0.5) != 0xbfe0000000000001 (-0.5000000000000001)"
PLAN = plan_batch()
NO_COSTS = Costs(**dict.fromkeys(Costs.__dataclass_fields__))


def facts_of(*rows: tuple) -> pl.DataFrame:
    """(group, index, sibling, reward, response_length) per sample; without a reward it failed."""
    names = ["group_index", "index", "sibling", "reward", "response_length"]
    frame = pl.DataFrame(list(rows), schema=names, orient="row")
    return frame.with_columns(failure=pl.when(pl.col("reward").is_null()).then(pl.lit("agent_error")))


def verdicts(n_differing: int, paths: list[str], check: str = "replay"):
    rows = parity_rows(PLAN).to_pylist()
    for row in rows[:n_differing]:
        row |= {"verdict": "differs", "reason": "own replay", "paths": paths, "check": check}
    return rows_to_table(rows, "parity")


def ending(parity=None, costs: Costs = NO_COSTS) -> Ending:
    batch = Batch(LakePaths("s3://bucket/lake"), make_config(), PLAN, [])
    facts = facts_of((0, 0, 0, 1.0, 7))
    return Ending(batch, make_summary(), costs, parity_rows(PLAN) if parity is None else parity, facts)


def test_groups_count_rollouts_once_and_the_weakest_come_first():
    facts = facts_of((0, 0, 0, 1.0, 5), (0, 0, 1, 1.0, 5), (0, 1, 0, 0.0, 5), (1, 2, 0, 0.0, 5), (1, 3, 0, None, 0))
    rows, more = group_rows(facts)
    assert [
        {"group": 1, "rollouts": 2, "failed": 1, "passed": 0, "pass_rate": 0.0, "mean_reward": 0.0},
        {"group": 0, "rollouts": 2, "failed": 0, "passed": 1, "pass_rate": 0.5, "mean_reward": 0.5},
    ] == rows and 0 == more


def test_a_group_without_any_reward_has_no_pass_rate_and_comes_first():
    rows, _ = group_rows(facts_of((0, 0, 0, 0.0, 5), (1, 1, 0, None, 0)))
    assert [(1, None), (0, 0.0)] == [(row["group"], row["pass_rate"]) for row in rows]


def test_a_list_of_groups_ends_and_says_how_many_are_left():
    rows, more = group_rows(facts_of(*[(k, k, 0, 1.0, 5) for k in range(MOST_ROWS + 7)]))
    assert (MOST_ROWS, 7) == (len(rows), more)


@pytest.mark.parametrize(
    ("rewards", "bins"),
    [
        ([], []),
        ([1.0, 0.0, 1.0], [("0", 1), ("1", 2)]),
        (list(range(101)), [(f"{10 * k} to {10 * (k + 1)}", 10 + (k == 9)) for k in range(10)]),
    ],
)
def test_rewards_stand_alone_where_they_are_few_and_in_bins_where_not(rewards, bins):
    assert bins == reward_bins(rewards) and len(rewards) == sum(n for _, n in bins)


def test_lengths_are_in_bins_that_double():
    assert [("0", 1), ("1", 0), ("2-3", 2), ("4-7", 1)] == length_bins([0, 2, 3, 7])
    assert [("64-127", 1), ("128-255", 1)] == length_bins([100, 200]) and [] == length_bins([])


def test_a_failed_rollout_is_in_no_distribution_and_a_sibling_not_among_the_rewards():
    charts = distributions(facts_of((0, 0, 0, 1.0, 5), (0, 0, 1, 1.0, 6), (0, 1, 0, None, 0)))
    assert [[("1", 1)], [("4-7", 2)]] == [list(chart.bars) for chart in charts]


def test_a_picture_is_carried_by_its_url():
    for url in (ending().parity_plot(), ending().distribution_plot()):
        head, _, data = url.partition(",")
        assert "data:image/svg+xml;base64" == head
        assert ElementTree.fromstring(b64decode(data)).tag.endswith("svg")


def test_every_verdict_is_counted_once_with_its_reason():
    summary = make_summary(live={"differs": 2, "equal": 1}, live_reasons={"differs": {"again": 1}})
    assert [
        ("equal", 2),
        ("equal_by_path: several samples", 1),
        ("not_comparable: no_sample", 1),
        ("live differs: again", 1),
        ("live differs", 1),
        ("live equal", 1),
    ] == list(verdict_chart(summary).bars)


def test_the_way_down_ends_at_one_difference_with_both_values_and_their_bits():
    text = verdict_text("b", "lake", make_summary(), verdicts(MOST_ROWS, [BITS, "x: 1 != 2"]))
    lines = text.splitlines()
    assert "| path | sample[1].rollout_log_probs[17] |" in lines
    assert "| staged | 0xbfe0000000000000 (-0.5) |" in lines
    assert "| replayed | 0xbfe0000000000001 (-0.5000000000000001) |" in lines
    assert "| further paths | 1 |" in lines and "| rollout | 0 |" in lines
    assert "`rollout parity b --lake lake` prints every path." in lines


def test_the_list_of_differing_rollouts_ends():
    plan = plan_batch(n_samples_per_prompt=16)
    rows = [{**row, "verdict": "differs", "reason": "no rows: gone"} for row in parity_rows(plan).to_pylist()]
    lines = verdict_text("b", "lake", make_summary(), rows_to_table(rows, "parity")).splitlines()
    assert MOST_ROWS == sum(line.endswith("| replay | no rows: gone | |") for line in lines)
    assert f"and {len(rows) - MOST_ROWS} more" in lines


def test_a_live_difference_says_that_the_rollout_was_run_again():
    assert "| run again | 2 |" in verdict_text("b", "lake", make_summary(), verdicts(1, ["x: 1 != 2"], "live"))


def test_the_report_of_a_batch_held_back_says_at_once_what_differs():
    text = ending(verdicts(1, [BITS])).text("Quarantined: because")
    assert text.index("Quarantined: because") < text.index("| path | sample[1]") < text.index("| rollouts |")
    assert "`rollout parity b1 --lake s3://bucket/lake`" in text
    assert "differs" not in ending().text("Published.")


def test_known_costs_are_part_of_the_summary_and_unknown_ones_are_not():
    costs = Costs(**{**NO_COSTS.to_json(), "gpu_seconds": 0.0, "cost": 1.5})
    assert [("gpu_seconds", "0"), ("cost", "1.5")] == ending(costs=costs).summary_rows()[-2:]


def test_where_the_rows_are():
    published, held = ending().lake_text(3), ending().lake_text(None)
    assert "| version | 3 |" in published and 'scan_samples("s3://bucket/lake", batch="b1")' in published
    assert "s3://bucket/lake/quarantine/b1" in held and "scan_samples" not in held


def test_what_stands_in_a_cell_cannot_leave_it():
    assert ["| a | |", "|---:|---|", "| &lt;b&gt; x\\|y | |"] == table(["a", ""], [["<b>\nx|y", ""]], ["---:"])


def test_no_text_is_indented():
    for text in (ending().text("x"), ending(verdicts(2, [BITS])).parity_text(), ending().lake_text(1)):
        assert not [line for line in text.splitlines() if line.startswith(" ")]
