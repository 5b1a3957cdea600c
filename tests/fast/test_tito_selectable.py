"""Every family that `renderers` ships can be chosen: built for a tokenizer that has the control tokens it asks for."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from renderers import configs
from scripted import user

from rollout.engine.tiny import CHECKPOINT
from rollout.errors import BadConfig
from rollout.tito.families import ENCODES_ITSELF, OPAQUE, family_names
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer

_CONTROL = re.compile(r"<?[|\uff5c][^<>]+[|\uff5c]>?|</?[a-z_]+>|\[[a-zA-Z_/]+\]")


class Asked(Tokenizer):
    """Remembers what it was asked for and does not have as one token."""

    missing: set[str]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        found = super().convert_tokens_to_ids(tokens)
        pairs = [(tokens, found)] if isinstance(tokens, str) else zip(tokens, found, strict=True)
        self.missing |= {token for token, number in pairs if number is None}
        return found

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids = super().encode(text, *args, **kwargs)
        self.missing |= {text} if len(ids) > 1 and _CONTROL.fullmatch(text) else set()
        return ids


@lru_cache(maxsize=1)
def shipped() -> list[str]:
    """Names of the formats among the package's own classes, read without our module."""
    classes = [c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, configs.BaseRendererConfig)]
    return sorted({str(c.model_fields["name"].default) for c in classes if "name" in c.model_fields} - OPAQUE)


def grown(directory: Path, added: list[str]) -> Asked:
    data = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    like, first = data["added_tokens"][-1], data["added_tokens"][-1]["id"] + 1
    data["added_tokens"] += [{**like, "id": first + n, "content": text} for n, text in enumerate(added)]
    (directory / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Asked(directory)
    tokenizer.missing = set()
    return tokenizer


def test_all_that_the_package_has_can_be_named() -> None:
    names = [name for name in shipped() if "PydanticUndefined" not in name]
    assert len(names) >= 20
    assert names == list(family_names())


@pytest.mark.parametrize("name", sorted(set(family_names()) - ENCODES_ITSELF))
def test_a_family_can_be_chosen_and_renders(name: str, tmp_path: Path) -> None:
    added: list[str] = []
    while True:
        tokenizer = grown(tmp_path, added)
        try:
            tito = Tito(tokenizer, name)
            rendered = tito.render([user("say so")], tools=None, thinking=False)
            break
        except BadConfig:
            assert tokenizer.missing, "it asks for nothing that could be given"
            added += sorted(tokenizer.missing)
    assert "say so" in tito.decode(rendered.ids)
    assert tito.stop_token_ids and max(tito.stop_token_ids) < tito.vocabulary
