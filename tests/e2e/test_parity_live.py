"""Live parity in a real batch: what is chosen runs again, and a faulty engine is named as such and holds it back."""

import json
from pathlib import Path

import numpy as np
import pytest
from faulty_facts import FaultyFacts

from rollout.lake import scan_parity


def test_chosen_rollouts_run_again_on_both_paths(quick_rollout, batch_command, tmp_path: Path):
    lake = tmp_path / "lake"
    done = quick_rollout(*batch_command, "--lake", lake, "--parity-live-fraction", "0.5", "--json")
    assert 0 == done.returncode, done.stderr
    summary = json.loads(done.stdout)["summary"]
    rows = scan_parity(lake, "mine").collect()
    live = rows.filter(check="live").sort("index")
    assert 32 == rows.filter(check="replay").height == sum(summary["verdicts"].values())
    assert 8 <= live.height <= 24 and live.height == sum(summary["live"].values())
    assert {"equal"} == set(summary["live"]) - {"not_comparable"}
    assert {"not_comparable": {"needs_version": summary["live"]["not_comparable"]}} == summary["live_reasons"]
    assert {("v2/v1", "embedded", "embedded")} == set(live.select("versions", "engine_a", "engine_b").rows())
    shown = json.loads(quick_rollout("parity", "mine", "--lake", lake, "--json").stdout)
    assert summary["live"] == shown["live"] and summary["verdicts"] == shown["verdicts"]


def flip_after(proxy: FaultyFacts, n_good: int) -> None:
    """One bit of one log-prob in every generation behind the first `n_good`."""

    def change(request, reply):
        if len(proxy.seen) > n_good:
            entry = reply["meta_info"]["output_token_logprobs"][0]
            entry[0] = float((np.array([entry[0]]).view(np.uint64) ^ np.uint64(1)).view(np.float64)[0])

    proxy.change = change


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_engine_that_moves_one_bit_is_named_and_judged_by_its_promise(
    quick_rollout, engine_url, tmp_path: Path, deterministic: bool
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "What is 2 + 2?"}], "agent": "single_turn"}\n')
    proxy = FaultyFacts(engine_url)
    flip_after(proxy, 2)  # the batch's own run and the own path again
    if not deterministic:
        proxy.server_facts = {"enable_deterministic_inference": False}
    options = ("--n-samples-per-prompt", "1", "--engine", "external", "--parity-live-fraction", "1", "--reward", "none")
    with proxy.in_thread():
        done = quick_rollout("run", "--prompts", prompts, "--batch-id", "b", *options, "--engine-url", proxy.url)
    assert 3 == len(proxy.seen), done.stderr
    (row,) = scan_parity(tmp_path / "lake", "b").collect().filter(check="live").to_dicts()
    assert ("engine: v2 against v1", 0, 1) == (row["reason"], row["first_token"], row["max_ulp"])
    assert row["paths"][0].startswith("exchange[0].output_log_probs[0]: 0x")
    assert (row["verdict"], done.returncode) == (("differs", 1) if deterministic else ("not_comparable", 0))
    if deterministic:
        assert "live parity: 1 of 1 rollouts differ: rollout 0: engine: v2 against v1: exchange[0]" in done.stderr
