"""SGLang's own CPU platform under an out-of-tree name: the built-in one is chosen only with kernels no wheel has."""

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum


class CpuPlatform(CpuSRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
