from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.errors import UnauthenticatedError
from loadgen import cli
from loadgen.cli import load
from loadgen.key_watch import REFUSALS
from tests.harness.stub_inference import StubRouter

app = typer.Typer()
app.command()(load)


@pytest.fixture
def router() -> Iterator[StubRouter]:
    stub = StubRouter()
    yield stub
    stub.stop()


def test_a_run_prints_a_table_and_writes_both_files(router: StubRouter, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    flags = ["--target", router.address, "--requests", "4", "--max-tokens", "3", "--slo-ttft", "5", *files]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.output
    assert "100.0% of the requests kept their SLO" in result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["requests"] == 4
    assert found["config"][0]["slo"]["ttft_seconds"] == 5.0
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_two_protocols_share_the_load(router: StubRouter, tmp_path: Path) -> None:
    flags = ["--protocol", "grpc", "--protocol", "http", "--target", router.address]
    flags += ["--target", "http://127.0.0.1:1", "--requests", "5", "--concurrency", "2", "--max-tokens", "2"]
    result = CliRunner().invoke(app, [*flags, "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["by_protocol"]["grpc"]["requests"] == 3
    assert found["by_protocol"]["http"]["failed"] == 2


def test_questions_come_from_a_file(router: StubRouter, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("first question\n\n  first question\n")
    flags = ["--target", router.address, "--requests", "1", "--workload", "conversation"]
    result = CliRunner().invoke(app, [*flags, "--questions", str(tmp_path / "q.txt")])
    assert result.exit_code == 0, result.output
    assert router.inference.requests[0].chat.messages[0].content == "first question"


def test_nothing_answered_is_a_failure(monkeypatch) -> None:
    """Targets that end after the look at them."""
    monkeypatch.setattr(cli, "why_unreachable", lambda address: "")
    result = CliRunner().invoke(app, ["--target", "127.0.0.1:1", "--requests", "2"])
    assert result.exit_code == 1
    assert "grpc_unavailable at 127.0.0.1:1" in result.output
    assert "Connection refused" in result.output


@pytest.mark.parametrize("rate", [[], ["--rate", "50"]])
def test_a_load_whose_key_is_refused_ends_and_names_the_flag(rate: list[str], router: StubRouter) -> None:
    router.inference.error = UnauthenticatedError("the API key is not valid")
    flags = ["--target", router.address, "--requests", "100", "--concurrency", "2", *rate]
    result = CliRunner().invoke(app, [*flags, "--api-key", "old"])
    assert result.exit_code == 2
    assert "--api-key: all targets refused it: the API key is not valid" in " ".join(
        result.output.replace("│", " ").split()
    )
    assert REFUSALS <= len(router.inference.requests) < 10


def test_a_dead_http_target_is_named_with_the_reason(router: StubRouter, tmp_path: Path) -> None:
    flags = ["--protocol", "grpc", "--protocol", "http", "--target", router.address, "--requests", "4"]
    flags += ["--target", "http://127.0.0.1:1", "--max-tokens", "2", "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(app, flags)
    assert "2 × connection at http://127.0.0.1:1\n" in result.output
    assert "Connect call failed" in result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["error_targets"] == {"connection": ["http://127.0.0.1:1"]}
    assert "Connect call failed" in found["error_messages"]["connection"][0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--protocol", "http", "--target", "ftp://x"], "http://host:port"),
        (["--protocol", "http", "--target", "http://h:99999"], "http://host:port"),
        (["--protocol", "http", "--target", "http://[::1"], "http://host:port"),
        (["--json", "/proc/none/r.json"], "--json /proc/none/r.json cannot be written"),
        (["--html", "/proc"], "cannot be written"),
        (["--questions", "/proc/none/q.txt", "--workload", "conversation"], "cannot be read"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_sent(
    flags: list[str], said: str, router: StubRouter
) -> None:
    target = [] if "--target" in flags else ["--target", router.address]
    result = CliRunner().invoke(app, ["--requests", "1", *target, *flags])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split()).replace("│ ", "")
    assert not router.inference.requests


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_missing_folder_is_named_before_the_run_and_not_made(
    flag: str, router: StubRouter, tmp_path: Path
) -> None:
    file = tmp_path / "reprots" / "r"
    result = CliRunner().invoke(app, ["--requests", "1", "--target", router.address, flag, str(file)])
    assert result.exit_code == 2
    assert "there is no folder" in " ".join(result.output.replace("│", " ").split())
    assert not file.parent.exists() and not router.inference.requests


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--requests", "0"], "requests"),
        (["--extra-body", "{"], "extra-body"),
        (["--seconds", "-1"], "seconds"),
        (["--rate", "1e300"], "rate"),
        (["--rate", "nan"], "rate"),
        (["--seconds", "inf"], "finite"),
        (["--rate", "1000", "--seconds", "1e6"], "at most 10000000 requests"),
        (["--rate", "1", "--requests", "99999999999"], "at most 10000000 requests"),
    ],
)
def test_bad_flags_are_named(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--requests", "3", "--seconds", "4"], "exactly one of --requests and --seconds is needed"),
        (["--warmup", "-1"], "--warmup: Input should be greater than or equal to 0"),
        (["--timeout", "0"], "--timeout: Input should be greater than 0"),
        (["--timeout", "1e10"], "--timeout: Input should be less than or equal to 100000000"),
        (["--max-tokens", "4294967296"], "--max-tokens: Input should be less than or equal to 4294967295"),
        (["--vocab-size", "9876543210"], "--vocab-size: Input should be less than or equal to 4294967295"),
        (["--slo-tpot", "-1"], "--slo-tpot: Input should be greater than 0"),
        (["--workload", "conversation", "--prompts", "text"], "leave --prompts out"),
        (["--tls-cert", "c.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-cert", "/proc/c.pem", "--tls-key", "/proc/c.key"], "--tls-key /proc/c.key cannot be read"),
        (["--rate", "0.001", "--seconds", "1"], "no request is due at --rate 0.001 within --seconds 1"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_given(flags: list[str], said: str, router: StubRouter) -> None:
    result = CliRunner().invoke(app, ["--target", router.address, *flags])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert not router.inference.requests


def test_the_host_of_a_grpc_target_may_begin_like_a_url() -> None:
    """`http-router:50051` is the address of a router's gRPC port."""
    own = ("protocol", "target", "json", "html")
    flags = {one.name: one.default for one in cli._PARAMETERS if one.name not in own}
    both = [cli.ProtocolName.GRPC, cli.ProtocolName.HTTP]
    grpc, http = cli._configs(both, ["http-router:50051", "http://router:8000"], flags)
    assert (grpc.addresses, http.addresses) == (("http-router:50051",), ("http://router:8000",))
