"""Long conversations and texts are rendered and tokenised on threads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from cluster.errors import (
    InvalidRequestError,
)
from router.text.conversation import Conversation
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, LONG_CHARACTERS, ModelText

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"


@pytest.fixture(scope="module")
def text():
    made = ModelText(DEMO)
    yield made
    made.close()


async def test_long_conversations_are_rendered_on_a_thread(text):
    threads: list[str] = []

    def read() -> Conversation:
        threads.append(threading.current_thread().name)
        return Conversation([{"role": "user", "content": "x"}])

    short = await text.chat(read, INLINE_CHAT_CHARACTERS)
    assert threads == [threading.current_thread().name]
    assert await text.chat(read, INLINE_CHAT_CHARACTERS + 1) == short
    assert threads[1].startswith("render")


async def test_long_texts_keep_no_others_waiting(text, monkeypatch):
    """A text that nothing bounds (it is to be cut, or only counted) may take seconds."""
    go_on = threading.Event()

    def encode(given: str, special: bool) -> list[int]:
        if len(given) > LONG_CHARACTERS:
            assert go_on.wait(30)
        return [len(given)]

    monkeypatch.setattr(text, "_encode", encode)
    long = [asyncio.create_task(text.encode("a" * (LONG_CHARACTERS + 1))) for _ in range(3)]
    await asyncio.sleep(0)  # they are before it
    try:
        async with asyncio.timeout(20):
            assert await text.encode("a" * LONG_CHARACTERS) == [LONG_CHARACTERS]
    finally:
        go_on.set()
    assert await asyncio.gather(*long) == 3 * [[LONG_CHARACTERS + 1]]


async def test_errors_in_a_long_conversation_are_reported(text):
    def read() -> Conversation:
        raise InvalidRequestError("messages[3]: must be an object", field="messages[3]")

    with pytest.raises(InvalidRequestError) as caught:
        await text.chat(read, INLINE_CHAT_CHARACTERS + 1)
    assert caught.value.field == "messages[3]"
