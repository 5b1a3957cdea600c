"""One committed generation and its place in a conversation: deltas only, never a snapshot.

Both session versions are made of these nodes: v1 keeps a list of them, v2 a forest.
Shapes: `_P` appended prompt ids, `_O` sampled ids, `_T` all ids up to and with this node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.generation import Generation

Message = dict[str, Any]


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """One generation: what the client appended to its parent, what the engine sampled, what we answered.

    `respelled` holds older messages by their place in the history, where the client's spelling of
    them differed from its last one on this path (at first: the stored one). `open_length` counts the
    generation prompt's ids at the end of this node's prompt. `digest` has read every id up to and with
    this node's sampled ones.

    `granted` only saves time: the last spelling of this node's own messages that a request was let
    repeat it with (null while there is none, or where it has numbers). `written_ids` likewise: all
    ids up to and with this node as JSON, kept by the last generation of a session only.
    """

    seq: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)
    appended: list[Message]
    respelled: dict[int, Message]
    reply: Message
    tools: list[dict[str, Any]] | None
    settings: dict[str, Any]
    appended_ids_P: NDArray[np.int32]
    open_length: int
    generation: Generation
    control_text: int
    sampling_seed: int | None
    rid: str
    requested_at: datetime
    committed_at: datetime
    n_messages: int
    n_tokens: int
    digest: blake2b
    rolled_back: bool = False
    granted: list[Message] | None = None
    written_ids: bytes | None = None

    @property
    def truncated(self) -> bool:
        return self.generation.finish == "length"

    @property
    def n_prompt(self) -> int:
        """Ids of this generation's prompt."""
        return self.n_tokens - len(self.generation.output_ids_O)

    @property
    def open_ids(self) -> list[int]:
        """The generation prompt of this node's turn."""
        return open_ids_of(self.appended_ids_P, self.open_length)


def open_ids_of(appended_ids_P: NDArray[np.int32], open_length: int) -> list[int]:
    """A turn's generation prompt; all that was appended where the template has none (DeepSeek behind a tool's)."""
    ids: list[int] = appended_ids_P[len(appended_ids_P) - open_length if open_length else 0 :].tolist()
    return ids


def path_to(node: Node | None) -> list[Node]:
    """Nodes from the root to `node`, itself included; empty for None. Iterative: depth has no limit."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def history_of(path: list[Node]) -> list[Message]:
    """Messages of a root path as they are stored: the clients' own, and our replies."""
    messages: list[Message] = []
    for node in path:
        messages.extend(node.appended)
        messages.append(node.reply)
    return messages


def spelled_by(path: list[Node]) -> list[Message]:
    """Messages of a root path as its last request spelled them; the last reply as it is stored."""
    messages: list[Message] = []
    for node in path:
        for place, message in node.respelled.items():
            messages[place] = message
        messages.extend(node.appended)
        messages.append(node.reply)
    return messages


def tokens_of(path: list[Node]) -> NDArray[np.int32]:
    """All ids of a root path, prompt and sampled, in order (shape `_T`)."""
    parts = [part for node in path for part in (node.appended_ids_P, node.generation.output_ids_O)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def ids_bytes(ids: NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32, the form in which every digest reads them."""
    return ids.astype("<i4", copy=False).tobytes()


def start_digest() -> blake2b:
    """A digest that has read no id yet: 128 bits are enough to tell prompts of one session apart."""
    return blake2b(digest_size=16)
