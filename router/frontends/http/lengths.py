"""Cheap length estimates of a request, made before anything processes it.

Values of a wrong type count as length 0: the parser refuses them later by name.
"""

from __future__ import annotations

from typing import Any

from router.request.validator import Validator
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, MESSAGE_CHARACTERS


def chat_size(messages: Any, validator: Validator) -> int:
    """Rendering cost of the messages, in characters; counting stops at the limit. Raises ContextLengthError."""
    if not isinstance(messages, list):
        return 0
    validator.check_messages(len(messages))
    size = MESSAGE_CHARACTERS * len(messages)
    for message in messages:
        if size > INLINE_CHAT_CHARACTERS:
            break
        content = message.get("content") if isinstance(message, dict) else None
        size += len(content) if isinstance(content, str) else _parts_size(content)
    return size


def _parts_size(content: Any) -> int:
    if not isinstance(content, list):
        return 0
    size = MESSAGE_CHARACTERS * len(content)
    if size <= INLINE_CHAT_CHARACTERS:
        texts = (part.get("text") for part in content if isinstance(part, dict))
        size += sum(len(text) for text in texts if isinstance(text, str))
    return size
