"""Tokenizers of the published kinds with a few tokens, and the demo model's."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router.text.contents import Contents
from router.text.templates import TemplateTexts

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model" / "tokenizer.json"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
WORDS = ["\u2581", "a", "b", "c", "\u2581a", "bc", "\u2581\u2581", "\u00e9", "\u2581\u00e9"]
MERGES = [("\u2581", "a"), ("b", "c"), ("\u2581", "\u2581"), ("\u2581", "\u00e9")]


def _with_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def _fallback_model() -> models.BPE:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **FALLBACK}
    vocab |= {word: len(vocab) + i for i, word in enumerate(WORDS)}
    return models.BPE(vocab=vocab, merges=MERGES, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def demo() -> Tokenizer:
    """GPT-2's alphabet, as Llama 3, Qwen and Mistral's newer models have it."""
    return Tokenizer.from_file(str(DEMO))


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(_fallback_model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    )
    return _with_specials(tokenizer)


def llama2() -> Tokenizer:
    """The same without a pre-tokenizer, as Llama 2's and Mistral's older models are converted."""
    tokenizer = Tokenizer(_fallback_model())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _with_specials(tokenizer)


def byte_level(*merges: tuple[str, str]) -> Tokenizer:
    pieces = [*ALPHABET, *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_level_with(*special: AddedToken) -> Tokenizer:
    made = byte_level()
    made.add_special_tokens(list(special))
    return made


def contents_of(*names: str, template: str = "") -> Contents:
    """Of a tokenizer with these special tokens."""
    tokenizer = byte_level_with(*(AddedToken(one, special=True) for one in names))
    return Contents(tokenizer, template=TemplateTexts.read(template))
