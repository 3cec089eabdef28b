"""`baton chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from baton.client import Client, GenerateOptions, Message, Stream
from baton.formatting import answer_text
from cluster.errors import BatonError, ConfigError, UnavailableError

HELP = """/help   this
/reset  forget the conversation
/quit   leave (so does Ctrl-D)
Ctrl-C  stop the answer"""


def converse(client: Client, *, temperature: float, max_tokens: int) -> None:
    """Hold a conversation until /quit or the end of input. Raises UnavailableError when no router answers, and
    ConfigError where there is no input."""
    if sys.stdin is None:
        raise ConfigError("baton chat reads what you say from standard input, and that is closed")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives `input` its history and line editing)
    models = client.models(timeout_seconds=10.0)
    if not models:
        raise UnavailableError("the router serves no model")
    console = Console(highlight=False, emoji=False)
    console.print(Text.assemble((answer_text(models[0].id), "bold"), ("  /help for commands", "dim")))
    Chat(client, console, temperature=temperature, max_tokens=max_tokens).loop()


@dataclass
class _Pace:
    """When tokens came."""

    clock: Callable[[], float]
    asked: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def ask(self) -> None:
        self.asked = self.clock()

    def arrived(self, tokens: int) -> None:
        self.last = self.clock()
        self.first = self.first or self.last
        self.tokens += tokens

    def line(self, cached: int | None) -> str:
        """The line to show below an answer."""
        if not self.tokens:
            return "no answer"
        parts = [f"first token {(self.first - self.asked) * 1e3:.0f} ms", f"{self.tokens} tokens"]
        if self.last > self.first:
            parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
        if cached is not None:
            parts.append(f"{cached} cached")
        return " · ".join(parts)


@dataclass
class Chat:
    """One conversation. Input comes from `ask`, which raises EOFError at its end."""

    client: Client
    console: Console
    temperature: float
    max_tokens: int
    ask: Callable[[], str] = lambda: input("\n› ")
    clock: Callable[[], float] = time.monotonic
    messages: list[Message] = field(default_factory=list)

    def loop(self) -> None:
        while (line := self._line()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _line(self) -> str | None:
        try:
            return self.ask().strip()
        except EOFError:
            self.console.print()
            return None
        except UnicodeDecodeError:
            self._note("that was no text in the terminal's encoding; write it again")
            return ""
        except KeyboardInterrupt:  # nothing to stop: as in a shell, a fresh prompt
            self._note("\nCtrl-D or /quit leaves")
            return ""

    def _command(self, line: str) -> bool:
        """False to leave."""
        if line in ("/quit", "/exit"):
            return False
        if line == "/reset":
            self.messages.clear()
            self._note("forgotten")
        else:
            self._note(HELP if line == "/help" else f"there is no {line}; /help shows what there is")
        return True

    def _answer(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        pace = _Pace(self.clock)
        try:
            text, note = self._stream(pace)
        except BatonError as error:
            self.messages.pop()
            self.console.print(Text(f"\n{answer_text(error.message)}", style="red"))
            return
        self._note(f"\n{note}")
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def _stream(self, pace: _Pace) -> tuple[str, str]:
        """The answer's text, and what to say below it. A stopped answer stays in the conversation as it is."""
        text: list[str] = []
        pace.ask()
        options: GenerateOptions = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        with _StopOnCtrlC() as stop, self.client.stream(self.messages, **options) as stream:
            stop.closes(stream)
            for chunk in stream:
                pace.arrived(len(chunk.token_ids))
                text.append(chunk.text)
                self.console.print(answer_text(chunk.text), end="", markup=False, soft_wrap=True)
        cached = stream.usage.cached_tokens if stream.usage else None
        return "".join(text), ("stopped · " if stop.pressed else "") + pace.line(cached)

    def _note(self, line: str) -> None:
        self.console.print(Text(line, style="dim"))


class _StopOnCtrlC:
    """While inside, Ctrl-C closes the stream instead of ending the program."""

    def __init__(self) -> None:
        self.pressed = False
        self._stream: Stream | None = None

    def closes(self, stream: Stream) -> None:
        self._stream = stream
        if self.pressed:
            stream.close()

    def __enter__(self) -> _StopOnCtrlC:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        self.pressed = True
        if self._stream is not None:
            self._stream.close()
