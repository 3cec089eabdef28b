"""A conversation against a real gRPC server; the lines a user would type come from a list."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from baton.chat import Chat, converse
from baton.client import Client
from cluster.errors import ConfigError, OverloadedError
from tests.harness.stub_inference import StubRouter


def talk(router: StubRouter, *lines: str | Callable[[], str]) -> str:
    """What the terminal shows."""
    script = iter(lines)

    def ask() -> str:
        try:
            line = next(script)
        except StopIteration:
            raise EOFError from None
        return line if isinstance(line, str) else line()

    console = Console(record=True, file=open(os.devnull, "w"), width=200)  # noqa: SIM115 (closed with the console)
    with Client(router.address) as client, console.file:
        Chat(client, console, temperature=0.5, max_tokens=4, ask=ask).loop()
        return console.export_text()


def roles(router: StubRouter) -> list[list[str]]:
    return [[turn.role for turn in request.chat.messages] for request in router.inference.requests]


def test_answers_stream_and_the_conversation_grows(router: StubRouter) -> None:
    shown = talk(router, "hello there", "and now?")
    assert roles(router) == [["user"], ["user", "assistant", "user"]]
    assert router.inference.requests[1].chat.messages[1].content.strip() in shown
    assert "4 tokens" in shown
    assert "2 cached" in shown
    assert router.inference.requests[0].options.max_tokens == 4


def test_reset_forgets(router: StubRouter) -> None:
    talk(router, "one", "/reset", "two")
    assert roles(router) == [["user"], ["user"]]


def test_commands_are_not_sent(router: StubRouter) -> None:
    shown = talk(router, "/help", "/nonsense", "", "/quit", "never asked")
    assert "Ctrl-C" in shown
    assert "there is no /nonsense" in shown
    assert not router.inference.requests


def test_an_error_is_shown_and_the_question_not_kept(router: StubRouter) -> None:
    router.inference.error = OverloadedError("come back\x1b later")

    def recover() -> str:
        router.inference.error = None
        return "again"

    assert "come back\ufffd later" in talk(router, "hello", recover)
    assert roles(router) == [["user"], ["user"]]


def test_ctrl_c_at_the_prompt_asks_again(router: StubRouter) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    assert "Ctrl-D or /quit leaves" in talk(router, interrupt, "hello")
    assert roles(router) == [["user"]]


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """A shell that runs the tests in the background makes them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_stops_the_answer_and_keeps_its_text(router: StubRouter) -> None:
    router.inference.hang_after = 2

    def press() -> None:
        router.inference.hanging.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    def go_on() -> str:
        presser.join()
        router.inference.hang_after = None
        return "and then?"

    presser = threading.Thread(target=press)
    presser.start()
    shown = talk(router, "hello", go_on)
    assert "stopped" in shown
    assert router.inference.cancelled.wait(10), "the cancellation reaches the server a moment later"
    assert roles(router)[-1][-1] == "user"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_answer_does_not_control_the_terminal(router: StubRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would set the clipboard and the window's title, or erase what is above it."""
    written = "\x1b]52;c;cm0=\x07\x9b2J\x08a\tb\n\u3000c\u200dd"
    monkeypatch.setattr("tests.harness.stub_inference.text_of", lambda _: written)
    shown = talk(router, "hello")
    assert "\ufffd]52;c;cm0=\ufffd\ufffd2J\ufffda" in shown and "\u3000c\u200dd" in shown
    assert not {"\x1b", "\x07", "\x9b", "\x08"} & {*shown}


def test_a_line_that_is_no_text_is_asked_for_again(router: StubRouter) -> None:
    def garbled() -> str:
        return b"\xff".decode()

    assert "no text in the terminal's encoding" in talk(router, garbled, "hello")
    assert roles(router) == [["user"]]


def test_without_an_input_it_says_so(router: StubRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's `<&-` closes it."""
    monkeypatch.setattr("sys.stdin", None)
    with Client(router.address) as client, pytest.raises(ConfigError, match="from standard input"):
        converse(client, temperature=0.5, max_tokens=4)
