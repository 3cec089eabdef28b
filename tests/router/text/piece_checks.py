"""Compares a text's pieces with the whole."""

from __future__ import annotations

from tokenizers import Tokenizer

from router.text.tokenized_pieces import PieceTokenizer, make_piece_tokenizer


def pieces_of(tokenizer: Tokenizer) -> PieceTokenizer:
    made = make_piece_tokenizer(tokenizer, 1 << 20)
    assert made is not None
    return made


def assert_equal(pieces: PieceTokenizer, tokenizer: Tokenizer, text: str) -> int:
    """The number of pieces."""
    found = pieces.look_up("", text)
    for special in (False, True):
        (whole,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
        assert pieces.complete(found, special) == whole.ids, (text, found.pieces)
    return len(found.pieces)
