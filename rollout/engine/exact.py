"""What makes a GPU's float32 arithmetic exact float32, and the same in every run. A CPU needs none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EXACT_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS may choose another sum order from run to run
    "NVIDIA_TF32_OVERRIDE": "0",  # a 1 from outside would round every matrix product to 10 bits
}
"""Variables that cuBLAS reads when the process first uses the GPU."""


def make_exact(device: torch.device) -> None:
    """Settings of this process for a CUDA `device`: no TF32, deterministic kernels, one kernel for one shape.

    Attention takes PyTorch's memory-efficient kernel (a decode step's rows) or plain matrix products
    (prompts): the others are not for float32, and are off so that no release chooses them.
    """
    if device.type != "cuda":
        return
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # A cache is never read where it was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
