"""Workloads: prompts by the session's number. Session i is the same in every run with the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from loadgen.config import LoadConfig
from loadgen.words import QUESTIONS, words

FIRST_TOKEN_ID = 256  # many vocabularies have bytes and special tokens below it


@dataclass(frozen=True)
class TextPrompt:
    text: str


@dataclass(frozen=True)
class TokenPrompt:
    ids: list[int]


@dataclass(frozen=True)
class ChatPrompt:
    messages: list[tuple[str, str]]  # (role, content)


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class Session(Protocol):
    """One user. The next prompt may depend on the answer to the one before."""

    def next(self, answer: str | None) -> Prompt | None:
        """The next prompt, or None at the end; `answer` is None at the start."""


Workload: TypeAlias = Callable[[int], Session]


def make_workload(config: LoadConfig) -> Workload:
    match config.workload:
        case "plain":
            return partial(_plain, config)
        case "shared":
            return Shared(config)
        case "conversation":
            return partial(_Conversation, config)


@dataclass
class _Single:
    """A session of one request."""

    prompt: Prompt

    def next(self, answer: str | None) -> Prompt | None:
        return self.prompt if answer is None else None


def _plain(config: LoadConfig, index: int) -> Session:
    """A prompt that shares nothing with others, from its first token."""
    source = random.Random(f"plain {config.seed} {index}")
    length = _length(config, source)
    if config.kind == "tokens":
        return _Single(TokenPrompt(_token_ids(config, source, length)))
    text = words(source, length)
    return _Single(ChatPrompt([("user", text)]) if config.kind == "chat" else TextPrompt(text))


class Shared:
    """Prompts that begin with one of a few system prompts, each followed by a part of its own."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        sources = [random.Random(f"prefix {config.seed} {number}") for number in range(config.prefixes)]
        self._prefix_ids = [_token_ids(config, source, config.prefix_tokens) for source in sources]
        self._prefix_text = [words(source, config.prefix_tokens) for source in sources]

    def __call__(self, index: int) -> Session:
        config = self._config
        source = random.Random(f"shared {config.seed} {index}")
        number, length = source.randrange(config.prefixes), _length(config, source)
        if config.kind == "tokens":
            return _Single(TokenPrompt(self._prefix_ids[number] + _token_ids(config, source, length)))
        own = words(source, length)
        if config.kind == "chat":
            return _Single(ChatPrompt([("system", self._prefix_text[number]), ("user", own)]))
        return _Single(TextPrompt(f"{self._prefix_text[number]}\n{own}"))


class _Conversation:
    """A user who asks, reads the answer, and asks again: the prompt holds all messages so far."""

    def __init__(self, config: LoadConfig, index: int) -> None:
        self._source = random.Random(f"conversation {config.seed} {index}")
        self._questions = config.questions or QUESTIONS
        self._turns_left = config.turns
        self._messages: list[tuple[str, str]] = [("system", config.system)] if config.system else []

    def next(self, answer: str | None) -> Prompt | None:
        if answer is not None:
            self._messages.append(("assistant", answer))
        if self._turns_left == 0:
            return None
        self._turns_left -= 1
        self._messages.append(("user", self._source.choice(self._questions)))
        return ChatPrompt(list(self._messages))


def _length(config: LoadConfig, source: random.Random) -> int:
    spread = config.prompt_spread
    return max(1, round(config.prompt_tokens * source.uniform(1 - spread, 1 + spread)))


def _token_ids(config: LoadConfig, source: random.Random, count: int) -> list[int]:
    return [source.randrange(FIRST_TOKEN_ID, config.vocab_size) for _ in range(count)]
