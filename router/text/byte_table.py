"""Detokenising from a table of what each token adds, in place of the tokenizer's decoder.

Decoders of two kinds have a table; for any other `Detokenizer` calls the tokenizer:

    ByteLevel       the bytes of all tokens, joined, are UTF-8; what is not valid becomes U+FFFD
    byte fallback   Replace ▁ by a space, ByteFallback, Fuse, and Strip of at most one space at the beginning:
                    a run of byte tokens is text if it is valid UTF-8, else one U+FFFD for each byte
"""

from __future__ import annotations

import codecs
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from router.text.detokenize import REPLACEMENT, Detokenizer
from router.text.longest_token import steps_of
from router.text.token_bytes import FALLBACK, byte_level_alphabet

MAX_VERIFIED = 1 << 19  # ids: about 5 µs each
_TOGETHER = 16  # ids in one text that is verified
_BATCH = 1024  # such texts in one call
_BYTE_FALLBACK: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

Piece = bytes | str  # bytes: they may be a part of a character
log = logging.getLogger(__name__)


class Decoder(Protocol):
    """A tokenizer's decoder, token by token."""

    def read(self, token: str) -> Piece:
        """The piece that a token of the vocabulary adds."""

    def join(self, pieces: Iterable[Piece]) -> str:
        """The text of a list of tokens."""

    def whole(self, piece: Piece) -> str:
        """The text that the piece adds behind whole characters, whatever follows; "" if that depends."""


class ByteLevelDecoder:
    def __init__(self) -> None:
        alphabet = byte_level_alphabet()
        others = [chr(code) for code in range(0x180) if chr(code) not in alphabet]
        self._bytes = str.maketrans({one: chr(byte) for one, byte in alphabet.items()})
        self._bytes |= str.maketrans(dict.fromkeys(others, REPLACEMENT))

    def read(self, token: str) -> bytes:
        try:
            return token.translate(self._bytes).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()  # an added token: it stands for itself

    def join(self, pieces: Iterable[Piece]) -> str:
        return b"".join(pieces).decode(errors="replace")  # type: ignore[arg-type]

    def whole(self, piece: Piece) -> str:
        assert isinstance(piece, bytes)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return ""


class ByteFallbackDecoder:
    def __init__(self, strips: bool):
        self._begin = " " if strips else ""

    def read(self, token: str) -> Piece:
        byte = FALLBACK.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ")

    def join(self, pieces: Iterable[Piece]) -> str:
        texts: list[str] = []
        run = b""
        for piece in (*pieces, ""):
            if isinstance(piece, bytes):
                run += piece
                continue
            if run:
                texts.append(_text_of_run(run))
                run = b""
            texts.append(piece)
        return "".join(texts).removeprefix(self._begin)

    def whole(self, piece: Piece) -> str:
        return piece if isinstance(piece, str) else ""


def _text_of_run(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)


class ByteTable:
    """The pieces that tokens add, by id; an entry is made when its id first comes."""

    def __init__(self, tokenizer: Tokenizer, decoder: Decoder):
        self.tokenizer = tokenizer
        self._decoder = decoder
        special = {i: one for i, one in tokenizer.get_added_tokens_decoder().items() if one.special}
        self.special = frozenset(special)
        # The tokenizer leaves out these texts, even as ordinary entries of its vocabulary.
        self._left_out = {one.content for one in special.values()}
        self.pieces: dict[int, Piece] = {}
        self.texts: dict[int, str] = {}  # of whole characters; "" for other tokens

    def detokenizer(self, before: list[int] | None = None) -> TableDetokenizer:
        joins_bytes = isinstance(self._decoder, ByteLevelDecoder)
        return (ByteLevelDetokenizer if joins_bytes else TableDetokenizer)(self, before)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these tokens, as the tokenizer decodes it."""
        known = self.pieces
        try:
            return self._decoder.join([known[token_id] for token_id in ids])
        except KeyError:
            return self._join(map(self._piece, ids))

    def whole_text(self, token_id: int) -> str:
        """The text that the token adds behind whole characters; "" if that depends on others. It is kept in `texts`."""
        piece = self._piece(token_id)
        text = "" if piece is None else self._decoder.whole(piece)
        text = self.texts[token_id] = "" if text.endswith(REPLACEMENT) else text
        return text

    def wrong(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Groups of ids that the tokenizer decodes otherwise. Each id is in two, with its neighbours and with far ones."""
        pieces = {token_id: self._read(token_id) for token_id in ids}
        far = -(-len(ids) // _TOGETHER)
        groups = [ids[at : at + _TOGETHER] for at in range(0, len(ids), _TOGETHER)]
        groups += [ids[at::far] for at in range(far)]
        for begin in range(0, len(groups), _BATCH):
            batch = groups[begin : begin + _BATCH]
            texts = self.tokenizer.decode_batch([list(group) for group in batch], skip_special_tokens=True)
            for group, text in zip(batch, texts, strict=True):
                if self._join(map(pieces.__getitem__, group)) != text:
                    yield group

    def _join(self, pieces: Iterable[Piece | None]) -> str:
        return self._decoder.join([piece for piece in pieces if piece is not None])

    def _piece(self, token_id: int) -> Piece | None:
        pieces = self.pieces
        if token_id not in pieces:
            if (piece := self._read(token_id)) is None:
                return None  # there is no limit to ids without a token
            pieces[token_id] = piece
        return pieces[token_id]

    def _read(self, token_id: int) -> Piece | None:
        token = self.tokenizer.id_to_token(token_id)
        return None if token is None or token in self._left_out else self._decoder.read(token)


class TableDetokenizer(Detokenizer):
    """The same text as `Detokenizer`, at every token. A token of whole characters behind whole ones is one look-up; with
    others, a window is decoded again from the table."""

    def __init__(self, table: ByteTable, before: list[int] | None = None):
        super().__init__(table.tokenizer, before, table.special)
        self._table = table
        self._texts = table.texts
        self._settled = False  # all text is returned, and ends with a whole character
        self._last: int | None = None  # the token that is the window, in place of `_ids`

    def add(self, token_id: int) -> str:
        if self._settled and (text := self._texts.get(token_id)):
            self._last = token_id
            return text
        return self._add_in_window(token_id)

    def _add_in_window(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        if token_id not in self._texts and self._table.whole_text(token_id):
            return self.add(token_id)
        self._restore_window()
        text = super().add(token_id)
        self._settled = bool(text) and self._read == len(self._ids)
        return text

    def _restore_window(self) -> None:
        if self._last is not None:
            self._ids, self._prefix, self._read, self._last = [self._last], 0, 1, None
            self._shown = None

    def flush(self) -> str:
        self._restore_window()
        self._settled = False
        return super().flush()

    def complete(self) -> str:
        if self._settled:
            return ""
        self._restore_window()
        return super().complete()

    def _decode(self, begin: int, end: int) -> str:
        return self._table.decode(self._ids[begin:end])


class ByteLevelDetokenizer(TableDetokenizer):
    """Holds the bytes of a character that several tokens make, and opens the window only for bytes that are none."""

    def __init__(self, table: ByteTable, before: list[int] | None = None):
        super().__init__(table, before)
        self._known = table.pieces
        self._open = True  # the window; else all text before `_held` is returned
        self._held: bytes = b""  # of a character that is not complete
        self._held_ids: list[int] = []

    def _add_in_window(self, token_id: int) -> str:
        if not self._open and (piece := self._known.get(token_id)):
            held = self._held + piece  # type: ignore[operator]
            try:
                text, used = codecs.utf_8_decode(held, "strict", False)
            except UnicodeDecodeError:
                used = -1
            if not used:
                self._held = held
                self._held_ids.append(token_id)
                self._settled = False
                return ""
            if used == len(held) and text[-1] != REPLACEMENT:
                self._settled = True
                self._forget_held()
                return text
        text = super()._add_in_window(token_id)
        self._open = self._open and not self._settled
        return text

    def _restore_window(self) -> None:
        if not self._open:
            self._ids, self._prefix, self._read, self._shown = [*self._held_ids], 0, 0, ""
            self._open = True
            self._forget_held()

    def _forget_held(self) -> None:
        self._held = b""
        self._held_ids.clear()


def make_byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    """The tokenizer's table, verified with every id of its vocabulary; None for decoders of other kinds."""
    decoder = _decoder_of(tokenizer)
    if decoder is None:
        return None
    began = time.monotonic()
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    table = ByteTable(tokenizer, decoder)
    if len(ids) > MAX_VERIFIED:
        log.info("tokenizer: %d ids are too many to verify a byte table", len(ids))
        return None
    for wrong in table.wrong(ids):
        log.warning("tokenizer: no byte table is used; it is wrong for ids %s", list(wrong))
        return None
    log.info("tokenizer: a byte table of %d ids, verified in %.2f s", len(ids), time.monotonic() - began)
    return table


def _decoder_of(tokenizer: Tokenizer) -> Decoder | None:
    steps = list(steps_of(tokenizer.decoder, "decoders"))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoder()
    if steps in (_BYTE_FALLBACK, [*_BYTE_FALLBACK, _STRIP]):
        return ByteFallbackDecoder(strips=_STRIP in steps)
    return None
