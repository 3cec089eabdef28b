"""What is asked. A workload numbers its sessions; session i is the same in every run with the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from loadgen.config import LoadConfig, WorkloadName
from loadgen.words import QUESTIONS, words

FIRST_TOKEN_ID = 256  # below it, many vocabularies keep bytes and special tokens


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
    return _WORKLOADS[config.workload](config)


@dataclass
class _Single:
    """A session of one request."""

    prompt: Prompt

    def next(self, answer: str | None) -> Prompt | None:
        return self.prompt if answer is None else None


class Plain:
    """Every prompt is new from its first token: nothing to share, nothing cached."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config

    def __call__(self, index: int) -> Session:
        config = self._config
        source = random.Random(f"plain {config.seed} {index}")
        return _Single(_prompt(config, source, _length(config, source)))


class Shared:
    """System prompts that many requests have in common, each followed by something of its own."""

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


class Conversations:
    """Users who ask, read the answer, and ask again: the prompt is everything said so far."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config

    def __call__(self, index: int) -> Session:
        return _Conversation(self._config, random.Random(f"conversation {self._config.seed} {index}"))


class _Conversation:
    def __init__(self, config: LoadConfig, source: random.Random) -> None:
        self._source = source
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


def _prompt(config: LoadConfig, source: random.Random, length: int) -> Prompt:
    if config.kind == "tokens":
        return TokenPrompt(_token_ids(config, source, length))
    text = words(source, length)
    return ChatPrompt([("user", text)]) if config.kind == "chat" else TextPrompt(text)


_WORKLOADS: dict[WorkloadName, Callable[[LoadConfig], Workload]] = {
    "plain": Plain,
    "shared": Shared,
    "conversation": Conversations,
}
