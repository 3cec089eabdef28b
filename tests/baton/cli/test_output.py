"""Commands print text verbatim: no markup is interpreted, no emoji substituted, no line broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from baton.cli import client_commands, output
from baton.cli.main import main
from cluster.errors import ConfigError
from tests.harness import stub_inference
from tests.harness.stub_inference import StubRouter

TEXT = "a[b] :smile: [/i] " + 60 * "word "


@pytest.fixture
def router() -> Iterator[StubRouter]:
    stub = StubRouter()
    yield stub
    stub.stop()


def test_an_answer_is_printed_as_it_came(router, monkeypatch, capsys):
    monkeypatch.setattr(stub_inference, "text_of", lambda token_id: TEXT)
    monkeypatch.setattr(output.console, "_width", 40)
    client_commands.generate("a", target=router.address, max_tokens=2)
    assert capsys.readouterr().out == 2 * TEXT + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_an_answer_controls_no_terminal_and_reaches_a_pipe_as_it_is(router, monkeypatch, capsys, terminal):
    monkeypatch.setattr(stub_inference, "text_of", lambda token_id: "\x1b[2Ja")
    monkeypatch.setattr(output.console, "_force_terminal", terminal)
    client_commands.generate("a", target=router.address, max_tokens=1)
    assert capsys.readouterr().out == ("\ufffd" if terminal else "\x1b") + "[2Ja\n"


def test_a_line_is_printed_as_it_is(capsys):
    output.say(TEXT)
    assert capsys.readouterr().out == TEXT + "\n"


def test_an_error_is_printed_as_it_is(monkeypatch, capsys):
    def refuse() -> None:
        raise ConfigError(TEXT.strip(), field="f")

    monkeypatch.setattr("baton.cli.main.app", refuse)
    monkeypatch.setattr(sys, "argv", ["baton"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"baton: {TEXT.strip()} [f]\n"


def test_an_error_of_a_server_controls_no_terminal(monkeypatch, capsys):
    def refuse() -> None:
        raise ConfigError("a\x1b]52;c;eA==\x07b\nc")

    monkeypatch.setattr("baton.cli.main.app", refuse)
    monkeypatch.setattr(sys, "argv", ["baton"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "baton: a\ufffd]52;c;eA==\ufffdb\nc\n"


def test_a_full_disk_behind_the_output_is_one_sentence():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "baton", "--help"]
        ended = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (
        1,
        "baton: the output cannot be written: No space left on device\n",
    )


def test_a_report_that_does_not_fit_the_disk_is_named(router, monkeypatch, capsys):
    arguments = [
        "load",
        "--target",
        router.address,
        "--requests",
        "1",
        "--max-tokens",
        "2",
        "--json",
        "/dev/full",
    ]
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    monkeypatch.setattr("os.dup2", lambda *_: None)  # the test's own output goes on
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert "requests" in printed.out, "the figures are printed all the same"
    assert printed.err == "baton: /dev/full cannot be written: No space left on device\n"


@pytest.mark.parametrize("columns", [80, 40])
def test_help_shows_whole_names_of_flags_in_a_narrow_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["baton", "up", "--help"])
    with pytest.raises(SystemExit):
        main()
    rows = [
        row[1:].split("  ")[0].strip(" │") for row in capsys.readouterr().out.splitlines() if row[:1] == "│"
    ]
    assert not [row for row in rows if row.endswith("…")]
    assert "--require-client-certs" in "".join(rows)
