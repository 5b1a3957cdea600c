"""A checkpoint's weights as torch tensors, straight from the safetensors format, which needs no package.

So a machine that has torch and nothing else can load a model (infra/h200).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rollout.engine.checkpoint import Checkpoint

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_weights(checkpoint: Checkpoint, device: torch.device) -> dict[str, Tensor]:
    """Every weight of a checked checkpoint as float32 on `device`.

    Raises:
        OSError, ValueError, RuntimeError: a file cannot be read after all, or there is no such device.
    """
    return {
        name: tensor.to(device=device, dtype=torch.float32)
        for path in sorted(set(checkpoint.files.values()))
        for name, tensor in _tensors(path)
    }


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[8 + length :]
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        # A copy, because a tensor may begin anywhere and a view of another type may not.
        yield name, data[begin:end].clone().view(_TYPES[entry["dtype"]]).view(entry["shape"])
