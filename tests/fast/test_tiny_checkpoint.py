"""The shipped checkpoint: small, complete, and the same thing to transformers, the renderer and our engine."""

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollout.agents.tools import TOOLS
from rollout.engine.checkpoint import read_checkpoint
from rollout.engine.model import load_model
from rollout.engine.tiny import CHECKPOINT
from rollout.engine.tiny.dialogues import make_dialogue
from rollout.engine.tiny.encoding import Encoder
from rollout.engine.tiny.tasks import MAKERS
from rollout.engine.tiny.tokenizer_training import MARKUP, SPECIAL, train_tokenizer
from rollout.engine.tiny.train import SEED
from rollout.tito.tokenizer import Tokenizer

LIMIT = 3_000_000
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def hf_tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def ours():
    return Tokenizer(CHECKPOINT)


def test_the_checkpoint_is_complete_and_at_most_3_mb():
    assert {path.name for path in CHECKPOINT.iterdir()} == FILES
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= LIMIT


def test_config_and_tokenizer_name_the_same_vocabulary(ours):
    config = AutoConfig.from_pretrained(CHECKPOINT)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.vocab_size == len(ours) and config.vocab_size % 64 == 0
    assert config.eos_token_id == ours.eos_token_id == ours.convert_tokens_to_ids("<|im_end|>")


def test_markup_is_single_ids_and_digits_stand_alone(ours):
    for text in (*SPECIAL, *MARKUP):
        assert ours.encode(text) == [ours.convert_tokens_to_ids(text)]
    assert [ours.decode([token]) for token in ours.encode("907")] == ["9", "0", "7"]


@given(text=st.text())
def test_text_survives_and_transformers_gives_the_same_ids(text, ours, hf_tokenizer):
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert hf_tokenizer.encode(text, add_special_tokens=False) == ids


def test_the_tokenizer_is_what_the_script_makes(tmp_path):
    train_tokenizer(tmp_path, seed=SEED)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes()


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_chat_template_gives_the_renderers_ids(kind, thinking, hf_tokenizer):
    encoder = Encoder(CHECKPOINT, thinking=thinking)
    rng = random.Random(9)
    for _ in range(10):
        _, dialogue = make_dialogue(rng, (kind,))
        for end in range(1, len(dialogue.messages) + 1):
            for rendered, text in _both(hf_tokenizer, encoder, dialogue.messages[:end], dialogue.tools, thinking):
                assert encoder.tokenizer.encode(text) == rendered


_CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text("ab_", min_size=1), "arguments": st.just('{"a": 1}')})}
)
_TEXT = st.text("a \n<>é0") | st.sampled_from(
    ["<think>\nx\n</think>\n\ny", "</think>z", "<tool_response>a</tool_response>"]
)
_MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": _TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": _TEXT},
        optional={"reasoning_content": _TEXT, "tool_calls": st.lists(_CALL, max_size=2)},
    ),
)


@given(
    messages=st.lists(_MESSAGE, min_size=1, max_size=6), tools=st.sampled_from([None, TOOLS]), thinking=st.booleans()
)
def test_the_chat_template_gives_the_renderers_text_for_any_history(messages, tools, thinking, hf_tokenizer):
    encoder = Encoder(CHECKPOINT, thinking=thinking)
    for rendered, text in _both(hf_tokenizer, encoder, messages, tools, thinking):
        assert encoder.tokenizer.decode(rendered) == text


def _both(hf_tokenizer, encoder, messages, tools, thinking):
    """The renderer's ids and the template's text, without and with the generation prompt."""
    for prompt in (False, True):
        text = hf_tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, enable_thinking=thinking
        )
        yield encoder.renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt), text


def test_transformers_and_our_engine_compute_the_same_logits():
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    encoder, engine = Encoder(CHECKPOINT), load_model(read_checkpoint(CHECKPOINT))
    _, dialogue = make_dialogue(random.Random(2), ("total",))
    ids = encoder.encode(dialogue).tokens_T.tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(engine.prefill(engine.new_cache(), ids)[0], theirs, rtol=1e-3, atol=1e-3)


def test_generation_ends_at_the_turns_end(ours):
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [ours.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]
