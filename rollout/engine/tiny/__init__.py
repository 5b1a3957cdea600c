"""The checkpoint that ships with the package, and how it was made.

`phrases` holds every fixed text, `tasks` makes questions, `dialogues` plays them out, `encoding`
turns them into token ids through the session's own renderer, `train` makes the weights, and
`prompts` makes prompt rows that no training dialogue began with.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""Directory of the shipped checkpoint, in Hugging Face layout (Qwen3ForCausalLM)."""
