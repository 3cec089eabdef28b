"""Tokenizers of the published kinds, trained on this project's documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from tests.router.text.small_tokenizers import FALLBACK, demo, llama2, metaspace

DOCS = Path(__file__).resolve().parents[3] / "docs"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<s>", "</s>"]
MORE = (
    "\u4e16\u754c\u3002\u4f60\u597d\uff0c\u518d\u89c1\u3002 caf\u00e9 na\u00efve "
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440. \U0001f642\n"
) * 20
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    return [MORE, *(path.read_text() for path in sorted(DOCS.glob("*.md"))[:6])]


def byte_level(*before: Any, normalizer: Any = None, **byte_level_options: Any) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    steps = [*before, pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **byte_level_options})]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if before else steps[0]
    made.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(corpus(), trainer)
    return with_special(made)


def split(pattern: str) -> Tokenizer:
    return byte_level(pre_tokenizers.Split(Regex(pattern), "isolated"), use_regex=False)


def qwen() -> Tokenizer:
    return byte_level(
        pre_tokenizers.Split(Regex(QWEN), "isolated"), normalizer=normalizers.NFC(), use_regex=False
    )


def sentencepiece(words: bool) -> Tokenizer:
    """`words`: merges are within words, as sentencepiece makes them by default."""
    made = Tokenizer(models.BPE())
    if words:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    else:
        made.normalizer = normalizers.Replace(" ", "\u2581")
    made.train_from_iterator(corpus(), BpeTrainer(vocab_size=800, show_progress=False))
    state = json.loads(made.model.__getstate__())
    vocab = {"<unk>": 0, **FALLBACK}
    for piece in sorted(state["vocab"], key=state["vocab"].__getitem__):
        vocab.setdefault(piece, len(vocab) + 2)
    return Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[tuple(merge) for merge in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )


def with_special(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return made


def llama2_trained(words: bool = True) -> Tokenizer:
    made = sentencepiece(words)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return with_special(made)


def gemma() -> Tokenizer:
    made = sentencepiece(words=True)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "\n", "\u2581\u2581", "  ")])
    return with_special(made)


def mistral() -> Tokenizer:
    made = sentencepiece(words=True)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return with_special(made)


def with_normalized(made: Tokenizer) -> Tokenizer:
    made.add_tokens([AddedToken(text, normalized=True) for text in ("<think>", "#", "..")])
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "demo": demo,
    "gpt2": byte_level,
    "gpt2, a space first": lambda: byte_level(add_prefix_space=True),
    "llama3": lambda: split(LLAMA3),
    "o200k": lambda: split(O200K),
    "qwen": qwen,
    "digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "llama2": llama2_trained,
    "llama2, normalized tokens": lambda: with_normalized(llama2_trained()),
    "gemma, normalized tokens": lambda: with_normalized(gemma()),
    "qwen, normalized tokens": lambda: with_normalized(qwen()),
    "llama2, small": llama2,
    "metaspace, small": metaspace,
    "gemma": gemma,
    "mistral": mistral,
}


@cache
def kind(name: str) -> Tokenizer:
    """Made once: some are trained."""
    return KINDS[name]()
