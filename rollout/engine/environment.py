"""What this host has for SGLang: a Python environment with it, and GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import rollout
from rollout.engine.recipes import Recipe
from rollout.errors import BadConfig, NoSGLang

PYTHON_VARIABLE = "ROLLOUT_SGLANG_PYTHON"
_CHECKOUT = Path(rollout.__file__).resolve().parent.parent


def sglang_python() -> Path:
    """The interpreter that runs SGLang: ROLLOUT_SGLANG_PYTHON, else the checkout's .venv-sglang, else this one.

    Raises:
        NoSGLang: none of them is there.
    """
    if given := os.environ.get(PYTHON_VARIABLE):
        if not os.access(given, os.X_OK):
            raise NoSGLang(f"{PYTHON_VARIABLE}={given}: no such program; `make sglang-cpu` builds an environment")
        return Path(given).absolute()
    built = _CHECKOUT / ".venv-sglang" / "bin" / "python"
    if built.exists():
        return built
    if importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    raise NoSGLang(
        f"no environment with SGLang: run `make sglang-cpu` in {_CHECKOUT}, "
        f"or set {PYTHON_VARIABLE} to the python of one"
    )


def host_gpus() -> list[str]:
    """The GPUs that a process started here may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in (part.strip() for part in visible.split(",")) if name and name != "-1"]
    numbers = [re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia[0-9]*")]
    return [str(number) for number in sorted(int(found[1]) for found in numbers if found is not None)]


def share_gpus(recipe: Recipe, gpus: list[str]) -> list[list[str]]:
    """The GPUs of each engine; one empty list per engine on a CPU.

    Raises:
        BadConfig: the host has too few.
    """
    if recipe.gpus == 0:
        return [[] for _ in range(recipe.engines or 1)]
    n_engines = recipe.engines or len(gpus) // recipe.gpus
    if n_engines == 0 or n_engines * recipe.gpus > len(gpus):
        wanted = max(1, n_engines) * recipe.gpus
        raise BadConfig(f"engine_recipe {recipe.name!r} needs {wanted} GPUs, this host shows {len(gpus)}")
    return [gpus[k * recipe.gpus : (k + 1) * recipe.gpus] for k in range(n_engines)]
