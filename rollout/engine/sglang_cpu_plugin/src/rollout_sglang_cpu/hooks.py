"""What SGLang does on a GPU only, replaced for a CPU. Each line says what would fail without it."""

from collections.abc import Callable
from functools import wraps
from pkgutil import resolve_name
from typing import Any

import torch

from rollout_sglang_cpu.murmur import murmur_hash32

REPLACED = {
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": lambda *args, **kwargs: None,  # Triton kernels
    "sglang.srt.layers.sampler.murmur_hash32": murmur_hash32,  # Triton or sgl_kernel
    "sglang.srt.mem_cache.pool_host.common._cuda_host_register": lambda *args, **kwargs: None,  # routed experts
}


def register_hooks() -> None:
    """`--enable-deterministic-inference` with torch's own attention then means: seeded sampling.

    Raises:
        SystemExit: this SGLang has no such name. SGLang logs any other error of a plugin and starts without it,
            and then samples otherwise than asked.
    """
    registry = find("sglang.srt.plugins.hook_registry")
    find("sglang.srt.arg_groups.choices.add_deterministic_attention_backend_choices")(["torch_native"])
    for target, replacement in REPLACED.items():
        find(target)
        registry.HookRegistry.register(target, replacement, registry.HookType.REPLACE)
    if not torch.cuda.is_available():
        _forget_pinned_memory()


def find(name: str) -> Any:
    """What SGLang has under a dotted name.

    Raises:
        SystemExit: nothing.
    """
    try:
        return resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"rollout-sglang-cpu does not fit this SGLang, which has no {name} ({error})") from error


def _forget_pinned_memory() -> None:
    """Without an accelerator pinned memory cannot be had, and LoRA asks for it."""
    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, _without_pin(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _without_pin(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
