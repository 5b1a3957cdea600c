"""Parity through a real SGLang on the CPU: the reference case live, and the embedded engine's tapes asked again."""

import json
from pathlib import Path

import pytest

from rollout.agents.reference_case import FIRST, SECOND, reference_inputs
from rollout.lake import scan_parity, scan_samples

pytestmark = pytest.mark.full
N_REFERENCE = 4
"""Of the case's 16 inputs: each is played three times, one request at a time."""
NEAR = 1e-4
"""Nats: two engines' float arithmetic moves a log-prob by far less, another context by far more."""


def options(**given: object) -> list[str]:
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def test_the_reference_case_live_on_both_paths_is_bit_equal(quick_rollout, sglang_url, tmp_path: Path):
    prompts = tmp_path / "reference.jsonl"
    rows = [{**row, "agent": "reference_case"} for row in reference_inputs()[:N_REFERENCE]]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    batch = options(prompts=prompts, batch_id="reference", n_samples_per_prompt=1, temperature=0, reward="none")
    engine = options(
        engine="external", engine_url=sglang_url, concurrency=1, parity_live_fraction=1, parity_min_equal=1
    )
    done = quick_rollout("run", *batch, *engine, "--json")
    assert 0 == done.returncode, done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert {"equal": N_REFERENCE} == summary["live"] == summary["verdicts"]
    assert {} == summary["live_reasons"], "alone, SGLang repeats the batch's own run too"
    assert N_REFERENCE * 9 == summary["turns"]
    samples = scan_samples(tmp_path / "lake", "reference").collect()
    # Else no tool was called, and all is vacuous.
    assert [[FIRST, SECOND]] * N_REFERENCE == [json.loads(text)["looked_up"] for text in samples["metadata"]]
    live = scan_parity(tmp_path / "lake", "reference").collect().filter(check="live")
    assert [("v2/v1", "external", 0)] * N_REFERENCE == live.select("versions", "engine_a", "max_ulp").rows()


def test_sglang_against_the_embedded_engines_tapes(quick_rollout, prompt_file, sglang_url, tmp_path: Path):
    """Every prompt greedy and at temperature 0.7. The engines draw their seeded noise differently, so sampled tokens
    part; as far as they go together, and in every greedy turn, log-probs are the same but for float arithmetic."""
    prompts, rows = tmp_path / "both.jsonl", [json.loads(line) for line in prompt_file.read_text().splitlines()]
    with prompts.open("w") as file:
        for temperature in (0.0, 0.7):
            for row in rows:
                sampling = {"temperature": temperature}
                print(json.dumps({**row, "metadata": {**row["metadata"], "sampling": sampling}}), file=file)
    batch = options(prompts=prompts, batch_id="mine", n_samples_per_prompt=1, sampling_bounds="temperature=0:1", seed=7)
    assert 0 == quick_rollout("run", *batch).returncode
    done = quick_rollout("parity", "mine", "--against", sglang_url, "--json")
    report = json.loads(done.stdout)
    assert 1 == done.returncode, "SGLang's log-probs are float32, the embedded engine's are not"
    assert (16, 16, ["float32"]) == (report["rollouts"], report["compared"], list(report["histogram"]))
    assert report["tokens_shared"] == sum(one["tokens"] for one in report["histogram"]["float32"])
    assert 0 < report["largest_difference"] < NEAR
    greedy, sampled = report["results"][:8], report["results"][8:]
    assert {"log_probs"} == {one["reason"] for one in greedy} and sum(one["tokens"] for one in greedy) > 100
    assert all(one["first_token"] is None and one["tokens"] == one["tokens_shared"] for one in greedy)
    for one in sampled:
        where = one["first_token"]
        assert (where is not None) == (one["reason"] == "tokens") == (one["tokens"] > one["tokens_shared"])
        assert where is None or where["path"].startswith(f"exchange[{where['turn']}].output_ids[{where['token']}]: ")
    assert any(one["first_token"] for one in sampled)
