"""SGLang on a CPU: what `sglang.srt.platforms` and `sglang.srt.plugins` are pointed at."""


def platform() -> str:
    """The platform class by its path: SGLang imports it only if it is the chosen one."""
    return "rollout_sglang_cpu.platform.CpuPlatform"


def register() -> None:
    """Called by SGLang in each of its processes before the engine starts."""
    from rollout_sglang_cpu.hooks import register_hooks

    register_hooks()
