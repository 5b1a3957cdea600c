"""Recipes are named for hardware, locked flag by flag: a changed flag changes bits and needs a reason."""

import sys

import pytest

from rollout.config import make_config
from rollout.engine import environment
from rollout.engine.environment import host_gpus, sglang_python, share_gpus
from rollout.engine.recipes import RECIPES, find_recipe, qwen3_8b_h200, qwen3_30b_a3b_h200x8, tiny_cpu
from rollout.errors import BadConfig, NoSGLang

DETERMINISTIC = "--enable-deterministic-inference"
PINNED = {
    "tiny_cpu": "--device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 32768 "
    f"--max-running-requests 32 --random-seed 0 {DETERMINISTIC} --disable-radix-cache --sleep-on-idle",
    "qwen3_8b_h200": f"{DETERMINISTIC} --attention-backend fa3 --disable-radix-cache --mem-fraction-static 0.5",
    "qwen3_30b_a3b_h200x8": f"{DETERMINISTIC} --attention-backend fa3 --disable-radix-cache "
    "--mem-fraction-static 0.8 --enable-return-routed-experts",
}


def test_the_flags_are_locked():
    assert {name: " ".join(make().flags) for name, make in RECIPES.items()} == PINNED
    assert list(RECIPES) == [make().name for make in RECIPES.values()]


def test_a_row_states_flags_and_variables_and_their_hash_follows_both():
    recipe = tiny_cpu()
    variables = ("CUDA_VISIBLE_DEVICES=", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "TORCHDYNAMO_DISABLE=1")
    assert recipe.stated == (*recipe.flags, *variables)
    assert 3 == len({make().flags_hash for make in RECIPES.values()}) and 16 == len(recipe.flags_hash)


def test_gpus_are_shared_out():
    eight = [str(k) for k in range(8)]
    assert [[]] == share_gpus(tiny_cpu(), [])
    assert [["3"], ["5"]] == share_gpus(qwen3_8b_h200(), ["3", "5"])
    assert [[name] for name in eight] == share_gpus(qwen3_30b_a3b_h200x8(), eight)
    with pytest.raises(BadConfig, match="needs 8 GPUs, this host shows 2"):
        share_gpus(qwen3_30b_a3b_h200x8(), ["0", "1"])
    with pytest.raises(BadConfig, match="needs 1 GPUs, this host shows 0"):
        share_gpus(qwen3_8b_h200(), [])


@pytest.mark.parametrize(("visible", "expected"), [("", []), ("-1", []), ("2, GPU-ab", ["2", "GPU-ab"])])
def test_visible_gpus_are_those_of_the_variable(monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert expected == host_gpus()


def test_the_interpreter_is_the_given_one_or_the_checkouts(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_CHECKOUT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("ROLLOUT_SGLANG_PYTHON", raising=False)
    with pytest.raises(NoSGLang, match="run `make sglang-cpu`"):
        sglang_python()
    built = tmp_path / ".venv-sglang" / "bin" / "python"
    built.parent.mkdir(parents=True)
    built.touch()
    assert built == sglang_python()
    monkeypatch.setenv("ROLLOUT_SGLANG_PYTHON", sys.executable)
    assert sys.executable == str(sglang_python())
    monkeypatch.setenv("ROLLOUT_SGLANG_PYTHON", str(tmp_path / "none"))
    with pytest.raises(NoSGLang, match="no such program; `make sglang-cpu`"):
        sglang_python()


def test_a_recipe_goes_with_sglang_and_must_be_known():
    with pytest.raises(BadConfig, match="engine_recipe goes with engine=sglang"):
        make_config(engine="sglang")
    with pytest.raises(BadConfig, match="engine_recipe goes with engine=sglang"):
        make_config(engine_recipe="tiny_cpu")
    with pytest.raises(BadConfig, match="engine_recipe 'h100': there is tiny_cpu, qwen3_8b_h200"):
        find_recipe("h100")
