"""What a GPU needs, as far as a CPU can tell: the settings are taken, and torch and numpy suffice for the model."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = """
import torch
from rollout.engine.exact import make_exact
make_exact(torch.device("cuda"))
assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.flash_sdp_enabled()
assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
"""
REFUSE_OTHERS = """
import importlib.metadata, sys
import numpy, torch
NAMES = {"aiohttp", "orjson", "tokenizers", "safetensors", "pyarrow", "pydantic", "polars", "renderers", "openai"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import asyncio
from infra.h200.model import check_model
from infra.h200.sizes import DRY
from infra.h200.tally import Tally
tally = Tally()
asyncio.run(check_model(DRY, tally))
assert (7, 0) == (tally.passed, tally.failed)
"""


def _python(code: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr


def test_the_settings_for_a_gpu_are_taken_without_a_warning():
    _python(SETTINGS)


def test_the_lanes_model_part_needs_torch_and_numpy_only():
    _python(REFUSE_OTHERS)
