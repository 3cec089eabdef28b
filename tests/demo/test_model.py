"""The shipped model loads, predicts its language, and fits its budget."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from router.text.conversation import Conversation
from router.text.tokenizer import ModelText

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
PYTHON = "import os\n\n\ndef main():\n    for name in os.listdir(path):\n        if not name:\n            return None\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize("text", [PYTHON, "ÄÖ 漢字 🙂\r\n\t", "\x00\x7f", ""])
def test_any_text_survives_the_tokenizer(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_chat_template_ends_where_the_assistant_begins():
    text = ModelText(MODEL)
    rendered = text.render(Conversation([{"role": "user", "content": "hi"}]))
    assert rendered == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_weights_are_bf16_finite_and_small():
    file = MODEL / "model.safetensors"
    assert file.stat().st_size <= 25_000_000
    with safe_open(str(file), "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  # not a dict
            tensor = weights.get_tensor(name)
            assert tensor.dtype is torch.bfloat16
            assert bool(tensor.isfinite().all()), name


@torch.inference_mode()
def test_it_predicts_python_far_better_than_chance(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = torch.tensor([[1, *tokenizer.encode(PYTHON).ids]])
    loss = float(model(ids, labels=ids).loss)
    assert loss < 0.6 * math.log(4096)
