"""Room on the local disks."""

from __future__ import annotations

import shutil
from pathlib import Path

from rollout.doctor.finding import Finding, ok, warn

WARN_BYTES = 2**30


def check_space(whose: str, folder: Path) -> Finding:
    """Free bytes of the disk that `folder` is on, or will be on."""
    there = next(part for part in (folder, *folder.parents) if part.exists())
    free = shutil.disk_usage(there).free
    detail = f"{whose}: {free / 2**30:.1f} GiB free at {folder}"
    return ok("disk", detail) if free >= WARN_BYTES else warn("disk", f"{detail}: make room, or take another disk")
