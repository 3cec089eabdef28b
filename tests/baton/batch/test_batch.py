"""`baton batch` against a router that a test scripts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.batch import lines, sending
from baton.batch.run import run_batch
from baton.batch.sending import Sending
from baton.cli.main import app
from cluster.errors import AttemptsExhaustedError, ConfigError, UnauthenticatedError
from router.frontends.http.errors import error_body, error_headers

Reply = tuple[int, dict[str, str], Any]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


class Stub:
    """Records requests; `reply` answers one, and None drops its connection."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any], str | None]] = []
        self.running = self.most = 0
        self.reply: Callable[[dict[str, Any], int], Reply | None] = lambda body, _: (
            200,
            {},
            {"usage": USAGE},
        )
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with stub._lock:
                    stub.seen.append((self.path, body, self.headers["authorization"]))
                    earlier = sum(one[1].get("prompt") == body.get("prompt") for one in stub.seen) - 1
                    stub.running += 1
                    stub.most = max(stub.most, stub.running)
                reply = stub.reply(body, earlier)
                with stub._lock:
                    stub.running -= 1
                if reply is None:
                    self.close_connection = True
                    return
                status, headers, answer = reply
                content = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(sending, "FIRST_PAUSE_SECONDS", 0.01)
    made = Stub()
    with made.server:
        thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.server.shutdown()
        thread.join()


def line(custom_id: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": path,
        "body": {"model": "m", "prompt": custom_id, **body},
    }


def write(file: Path, *of: Any) -> Path:
    file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in of))
    return file


def read(file: Path) -> dict[str, Any]:
    made = [json.loads(one) for one in file.read_text().splitlines()]
    assert len({one["custom_id"] for one in made}) == len(made)
    return {one["custom_id"]: one for one in made}


def test_answers_are_lines_of_openai_s_form(stub: Stub, tmp_path: Path) -> None:
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
    source = write(tmp_path / "in", *(line(path, path) for path in paths), line("high", priority="high"), "")
    stub.reply = lambda body, _: (
        (400, {}, {"error": {"message": "no"}})
        if body["prompt"] == "high"
        else (200, {"x-request-id": "r"}, {"usage": USAGE})
    )
    command = ["batch", str(source), str(tmp_path / "out"), "--url", stub.url, "--api-key", "k"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "4 of 5 requests succeeded, 1 failed" in result.output
    assert "12 prompt tokens, 8 answer tokens" in result.output
    made = read(tmp_path / "out")
    for path in paths:
        answer = made[path]
        assert answer.pop("id").startswith("batch_req_")
        response = {"status_code": 200, "request_id": "r", "body": {"usage": USAGE}}
        assert answer == {"custom_id": path, "response": response, "error": None}
    assert made["high"]["response"]["status_code"] == 400 and made["high"]["error"] is None
    assert {one[0] for one in stub.seen} == set(paths) and {one[2] for one in stub.seen} == {"Bearer k"}
    assert sorted(one[1]["priority"] for one in stub.seen) == [*["batch"] * 4, "high"]
    # The failure again, and then nothing is left
    stub.reply = lambda body, _: (200, {}, {})
    assert CliRunner().invoke(app, command).exit_code == 1 and len(stub.seen) == 5
    assert CliRunner().invoke(app, [*command, "--retry-failed"]).exit_code == 0
    assert len(stub.seen) == 6 and len(read(tmp_path / "out")) == 5


@pytest.mark.parametrize("depth", [252, 253, 254, 400, 900])
@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_is_nested_too_deep_is_a_failed_one(
    stub: Stub, tmp_path: Path, depth: int, status: int
) -> None:
    """It was a traceback in the middle of a batch, of which no further request was sent."""
    deep: Any = []
    for _ in range(depth):
        deep = [deep]
    stub.reply = lambda body, _: (status, {}, deep) if body["prompt"] == "a" else (200, {}, {})
    source, out = write(tmp_path / "in", line("a"), line("b")), tmp_path / "out"
    tally = run_batch(source, out, Sending([stub.url], concurrency=1, retry_seconds=0.0))
    assert tally.succeeded + tally.failed == 2 and read(out)["b"]["response"]["status_code"] == 200
    assert tally.failed == 1 or (status == 200 and depth == 252)
    assert run_batch(source, out, Sending([stub.url])).left == 0, "the file can be read again"


def test_a_run_goes_on_after_a_half_written_line(stub: Stub, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line(f"{i}") for i in range(5)))
    out = tmp_path / "out"
    run_batch(write(tmp_path / "first", line("0"), line("3")), out, Sending([stub.url]))
    with out.open("a") as more:
        more.write('{"id":"batch_req_1","custom_id":"4","resp')
    tally = run_batch(source, out, Sending([stub.url]))
    assert (tally.earlier, tally.succeeded) == (2, 3)
    assert sorted(one[1]["prompt"] for one in stub.seen) == ["0", "1", "2", "3", "4"]
    assert set(read(out)) == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("content", ["notes", "notes\n", '{"a": 1}\n'])
def test_a_file_that_no_batch_wrote_is_left_alone(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    out.write_text(content)
    with pytest.raises(ConfigError, match="no answer of a batch"):
        run_batch(write(tmp_path / "in", line("a")), out, Sending(["http://127.0.0.1:1"]))
    assert out.read_text() == content


def test_bad_lines_are_named_and_nothing_is_sent(stub: Stub, tmp_path: Path) -> None:
    bad: tuple[tuple[Any, str], ...] = (
        (line("a"), "line 2: custom_id 'a' is an earlier line's"),
        ("{", "line 3: no JSON"),
        ("[]", "line 4: no JSON object"),
        ({**line("b"), "method": "GET"}, "line 5: method"),
        ({**line("b"), "url": "/v1/images"}, "line 6: url"),
        ({**line("b"), "body": "x"}, "line 7: body"),
        (line("b", stream=True), "line 8: a batch's answers are not streamed"),
        ({**line("b"), "custom_id": 7}, "line 9: custom_id"),
        ({**line("b"), "extra": 7}, "line 10: unknown field 'extra'"),
        (
            '{"custom_id": "b", "url": "/v1/completions", "body": {"x": %s}}' % ("[" * 300 + "]" * 300),
            "line 11: body",
        ),
    )
    source = write(tmp_path / "in", line("a"), *(one for one, _ in bad))
    with pytest.raises(ConfigError) as caught:
        run_batch(source, tmp_path / "out", Sending([stub.url]))
    for _, said in bad:
        assert said in caught.value.message
    with pytest.raises(ConfigError, match="same file"):
        run_batch(source, source, Sending([stub.url]))
    assert not stub.seen


def test_a_pipe_is_refused_as_its_requests_can_be_read_once(stub: Stub, tmp_path: Path) -> None:
    """It was checked, and at the second reading empty: no request was sent, and the exit code was 0."""
    reading, writing = os.pipe()
    os.write(writing, json.dumps(line("a")).encode() + b"\n")
    os.close(writing)
    try:
        with pytest.raises(ConfigError, match="not a regular file"):
            run_batch(Path(f"/dev/fd/{reading}"), tmp_path / "out", Sending([stub.url]))
    finally:
        os.close(reading)
    assert not (tmp_path / "out").exists()


def test_an_output_of_which_nothing_can_be_read_is_refused(stub: Stub, tmp_path: Path) -> None:
    """It was opened, and the run ended with a traceback."""
    source = write(tmp_path / "in", line("a"))
    with pytest.raises(ConfigError, match="not a regular file") as refused:
        run_batch(source, Path("/dev/null"), Sending([stub.url]))
    assert refused.value.field == "output" and not stub.seen


def test_requests_are_sent_again_while_time_is_left(stub: Stub, tmp_path: Path) -> None:
    replies: dict[str, list[Reply | None]] = {
        "busy": [(429, {"retry-after": "0.02"}, {}), (503, {}, {}), None],
        "lost": [None] * 99,
        "later": [(429, {"retry-after": "9"}, {"error": {}})],
    }

    def reply(body: dict[str, Any], earlier: int) -> Reply | None:
        script = replies[body["prompt"]]
        return script[earlier] if earlier < len(script) else (200, {}, {"usage": USAGE})

    stub.reply = reply
    urls = ["http://127.0.0.1:1", stub.url]  # no router is at the first address
    served = run_batch(
        write(tmp_path / "a", line("busy")), tmp_path / "a.out", Sending(urls, retry_seconds=30)
    )
    lost = run_batch(
        write(tmp_path / "b", line("lost")), tmp_path / "b.out", Sending(urls, retry_seconds=0.3)
    )
    # Less time than it is told to wait, and enough for one answer however busy the machine
    later = run_batch(
        write(tmp_path / "c", line("later")), tmp_path / "c.out", Sending(urls, retry_seconds=8)
    )
    assert [(one.succeeded, one.failed) for one in (served, lost, later)] == [(1, 0), (0, 1), (0, 1)]
    made = read(tmp_path / "a.out") | read(tmp_path / "b.out") | read(tmp_path / "c.out")
    assert made["busy"]["response"]["status_code"] == 200
    assert made["lost"]["response"] is None and made["lost"]["error"]["code"] == "connection_error"
    assert made["later"]["response"]["status_code"] == 429


def test_a_request_that_failed_at_several_workers_is_not_sent_again(stub: Stub, tmp_path: Path) -> None:
    """It was, for ten minutes: each time it could end as many workers again."""
    error = AttemptsExhaustedError("2 engines failed while they computed this request")
    headers, body = error_headers(error), error_body(error)
    stub.reply = lambda asked, _: (
        (error.http_status, headers, body) if asked["prompt"] == "a" else (200, {}, {})
    )
    source, out = write(tmp_path / "in", line("a"), line("b")), tmp_path / "out"
    tally = run_batch(source, out, Sending([stub.url], concurrency=1))
    assert (tally.succeeded, tally.failed) == (1, 1)
    assert [one[1]["prompt"] for one in stub.seen] == ["a", "b"]
    assert read(out)["a"]["response"] == {"status_code": 503, "request_id": "", "body": body}


def test_a_refused_key_ends_the_batch(stub: Stub, tmp_path: Path) -> None:
    stub.reply = lambda body, _: (401, {}, {})
    with pytest.raises(UnauthenticatedError):
        run_batch(
            write(tmp_path / "in", *(line(f"{i}") for i in range(50))),
            tmp_path / "out",
            Sending([stub.url], concurrency=2),
        )
    assert len(stub.seen) <= 2 and not (tmp_path / "out").read_text()


def test_concurrency_and_reading_are_bounded(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_ahead: list[int] = []
    original = lines.requests

    def counted(file: Path) -> Iterator[lines.Request]:
        for number, request in enumerate(original(file), 1):
            read_ahead.append(number - len(stub.seen))
            yield request

    monkeypatch.setattr(lines, "requests", counted)
    source = write(tmp_path / "in", *(line(f"{i}") for i in range(40)))
    tally = run_batch(source, tmp_path / "out", Sending([stub.url], concurrency=3))
    assert tally.succeeded == 40 and stub.most <= 3 and max(read_ahead) <= 3


def test_one_run_writes_an_output(stub: Stub, tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a"))
    refused: list[str] = []

    def reply(body: dict[str, Any], _: int) -> Reply:
        try:
            run_batch(source, tmp_path / "out", Sending([stub.url]))
        except ConfigError as error:
            refused.append(error.message)
        return 200, {}, {}

    stub.reply = reply
    run_batch(source, tmp_path / "out", Sending([stub.url]))
    assert refused and "another run" in refused[0]


@pytest.mark.parametrize("wrong", ["broken", None], ids=["a broken line", "no file"])
def test_failed_answers_are_kept_until_the_input_has_been_checked(
    stub: Stub, tmp_path: Path, wrong: str | None
) -> None:
    """They were dropped before the input was read, so a mistake in it cost the reasons of all failures."""
    stub.reply = lambda body, _: (400 if body["prompt"] == "b" else 200, {}, {})
    source, out = write(tmp_path / "in", line("a"), line("b")), tmp_path / "out"
    run_batch(source, out, Sending([stub.url]))
    before = out.read_bytes()
    other = tmp_path / "other" if wrong is None else write(tmp_path / "other", wrong)
    with pytest.raises(ConfigError):
        run_batch(other, out, Sending([stub.url]), retry_failed=True)
    assert out.read_bytes() == before
    stub.reply = lambda body, _: (200, {}, {})
    tally = run_batch(source, out, Sending([stub.url]), retry_failed=True)
    assert (tally.requests, tally.left, tally.earlier, tally.earlier_failed) == (2, 1, 1, 0)
    assert {one: made["response"]["status_code"] for one, made in read(out).items()} == {"a": 200, "b": 200}


def test_an_answer_whose_line_could_not_be_read_again_is_a_failed_one(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run refused the file that this one had written. The limit of input lines is another one."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 500)
    monkeypatch.setattr(lines, "MAX_ANSWER_BYTES", 2000)
    source, out = write(tmp_path / "in", line("a"), line("b"), line("c")), tmp_path / "out"
    sizes = {"a": 1000, "b": 2000, "c": 1}
    stub.reply = lambda body, _: (200, {}, {"usage": USAGE, "text": "x" * sizes[body["prompt"]]})
    tally = run_batch(source, out, Sending([stub.url], concurrency=1))
    assert (tally.succeeded, tally.failed) == (2, 1)
    assert max(map(len, out.read_bytes().splitlines(keepends=True))) <= 2000
    failed = read(out)["b"]
    assert failed["response"] is None and failed["error"]["code"] == "answer_too_long"
    again = run_batch(source, out, Sending([stub.url]))
    assert (again.left, again.earlier, again.earlier_failed) == (0, 3, 1)


def test_a_priority_of_null_is_none(stub: Stub, tmp_path: Path) -> None:
    """It was sent as null, which is the class of interactive requests."""
    source = write(tmp_path / "in", line("a", priority=None), line("b", priority=0), line("c"))
    run_batch(source, tmp_path / "out", Sending([stub.url]))
    assert {body["prompt"]: body["priority"] for _, body, _ in stub.seen} == {
        "a": "batch",
        "b": 0,
        "c": "batch",
    }
