"""The bytes that single tokens add to a text: a character may be split across several tokens."""

from __future__ import annotations

import codecs
import re

from tokenizers import Tokenizer

from router.text.longest_token import steps_of

FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte that no other token covers


def byte_level_alphabet() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level tokenizers (GPT-2's `bytes_to_unicode`): printable
    Latin-1 as itself, the others as the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenPieces:
    """A tokenizer's tokens as they stand within a text: one that begins a word for Metaspace begins with a space."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        steps = {step["type"] for step in steps_of(tokenizer.decoder, "decoders")}
        self._alphabet = byte_level_alphabet() if "ByteLevel" in steps else {}
        self._falls_back = "ByteFallback" in steps
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._known: dict[int, bytes] = {}  # by token id: no larger than the vocabulary

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; b"" for an id without one. The bytes of a text's tokens, joined, are its UTF-8."""
        known = self._known.get(token_id)
        if known is None:
            piece = self._tokenizer.id_to_token(token_id)
            if piece is None:
                return b""
            known = self._known[token_id] = self._bytes(token_id, piece)
        return known

    def _bytes(self, token_id: int, piece: str) -> bytes:
        if self._alphabet:
            if all(character in self._alphabet for character in piece):
                return bytes(self._alphabet[character] for character in piece)
            return piece.encode()  # an added token: the decoder leaves it as it is
        if self._falls_back and (byte := FALLBACK.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        # The text that it adds behind another token: the first one of a text may lose its space.
        alone = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return str(twice[len(alone) :]).encode()

    def text_of(self, token_id: int) -> str:
        """The token's text, with bytes that are not whole characters as OpenAI writes them: `\\xf0\\x9f`."""
        return self.bytes_of(token_id).decode(errors="backslashreplace")

    def in_answer(self, token_id: int) -> bytes:
        """As `bytes_of`, but answers show no special tokens."""
        return b"" if token_id in self.special else self.bytes_of(token_id)


class TextOffsets:
    """The position of each token in an answer, in characters. A token that completes a character begins with it."""

    def __init__(self, pieces: TokenPieces, echoed: str = ""):
        """`echoed`: the prompt's text, which precedes the answer. What the tokenizer puts around it
        is not in it: special tokens, and a space before it."""
        self._pieces, self._echoed = pieces, echoed
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, token_id: int) -> int:
        begins = self._characters
        within = begins < len(self._echoed)
        piece = self._in_prompt(token_id) if within else self._pieces.in_answer(token_id)
        self._characters += len(self._decoder.decode(piece))
        return begins

    def _in_prompt(self, token_id: int) -> bytes:
        piece, begins = self._pieces.bytes_of(token_id), self._characters
        if token_id in self._pieces.special:
            return piece if self._echoed.startswith(self._pieces.text_of(token_id), begins) else b""
        return piece[1:] if not begins and piece[:1] == b" " and self._echoed[0] != " " else piece
