"""The size of a conversation, which decides where it is rendered."""

from __future__ import annotations

from typing import Any

from router.request.messages import chat_size
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, MESSAGE_CHARACTERS


def many(count: int, content: Any = "") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}] * count


def test_the_size_of_a_conversation():
    size = chat_size
    assert size(many(2, "abc")) == 2 * (MESSAGE_CHARACTERS + 3)
    assert size(many(1, [{"type": "text", "text": "abc"}] * 2)) == MESSAGE_CHARACTERS * 3 + 2 * len("textabc")
    few = INLINE_CHAT_CHARACTERS // MESSAGE_CHARACTERS
    for long in (many(few + 1), many(1, "x" * INLINE_CHAT_CHARACTERS), many(1, [{}] * few)):
        assert size(long) > INLINE_CHAT_CHARACTERS
    invalid: list[list[Any]] = [
        [None],
        [{}],
        [{"content": 3}],
        [{"content": [3]}],
        [{"content": [{"text": 3}]}],
    ]
    for odd in invalid:
        assert size(odd) <= 2 * MESSAGE_CHARACTERS, "read_messages says what is wrong"
