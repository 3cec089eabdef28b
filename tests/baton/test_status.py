from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from baton.cli.status_table import render, show
from baton.router_http import RouterHttp
from cluster.errors import ConfigError, UnavailableError

VIEW: dict[str, Any] = {
    "router": {"id": "router-1", "uptime_seconds": 3725.5, "requests_in_flight": 3},
    "redis": {"ok": True},
    "placement": {"calls": 12, "requests": 11},
    "workers": [
        {
            "id": "prefill-1",
            "role": "prefill",
            "address": "127.0.0.1:4001",
            "state": "ready",
            "lease": "suspect",
            "status": {"running": 1, "waiting": 2, "prefix_hit_ratio": 0.25, "handoffs": 9},
        },
        {
            "id": "decode-1",
            "role": "decode",
            "state": "ready",
            "lease": "live",
            "status": {"kv_usage_ratio": 0.5, "kv_bytes": 3 << 20, "steps": 1234},
        },
    ],
}


class _Router(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]]

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, b""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[str]:
    """Serves the parameter as /v1/cluster."""
    handler = type("Handler", (_Router,), {"answers": {"/v1/cluster": request.param}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def shown(view: Any, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(view, wide=width > 100))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_lists_what_each_worker_does() -> None:
    text = shown(VIEW)
    assert "1 h 02 min" in text
    assert "3 in flight" in text
    assert "12 placements" in text
    assert "Redis ok" in text
    decode, prefill = (line for line in text.splitlines() if "-1" in line and "router" not in line)
    assert "50%" in decode
    assert "3.0 MiB" in decode
    assert "1,234" in decode
    assert "suspect" in prefill
    assert "1/2" in prefill
    assert "25%" in prefill


def test_eighty_columns_are_enough() -> None:
    lines = shown(VIEW, width=80).splitlines()
    assert len([line for line in lines if line.strip()]) == 4
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    "view", [{}, {"workers": [{}]}, {"workers": None, "router": None, "redis": {"ok": False}}]
)
def test_a_missing_value_is_a_dash(view: Any) -> None:
    assert "–" in shown(view)


@pytest.mark.parametrize("router", [(200, json.dumps(VIEW).encode())], indirect=True)
def test_show_fetches_and_prints(router: str) -> None:
    console = Console(file=io.StringIO(), width=120)
    show(router, as_json=False, console=console)
    show(router.removeprefix("http://"), as_json=False, console=console)
    assert console.file.getvalue().count("prefill-1") == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("router", [(200, json.dumps(VIEW).encode())], indirect=True)
def test_json_is_passed_through(router: str) -> None:
    console = Console(file=io.StringIO(), width=40)
    show(router, as_json=True, console=console)
    assert json.loads(console.file.getvalue()) == VIEW  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("router", "error"),
    [((503, b""), UnavailableError), ((200, b"<html>"), ConfigError)],
    indirect=["router"],
)
def test_other_answers_are_errors(router: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        show(router, as_json=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "::nonsense::"])
def test_no_router_is_an_error(url: str) -> None:
    with pytest.raises(UnavailableError):
        show(url, as_json=False)


@pytest.mark.parametrize("name", ["w[/x]", "[fd00::8]:5000", "w[link=http://evil]x", "w\x1b]0;title\x07"])
def test_names_and_addresses_are_no_markup_and_control_no_terminal(name: str) -> None:
    worker = {"id": name, "address": name, "role": "decode", "state": "ready", "lease": "live"}
    file = io.StringIO()
    Console(file=file, width=200).print(render({"workers": [worker]}))
    shown = name.replace("\x1b", "\N{REPLACEMENT CHARACTER}").replace("\x07", "\N{REPLACEMENT CHARACTER}")
    assert file.getvalue().count(shown) == 2


@pytest.mark.parametrize(
    ("seconds", "lease", "named"), [(47.0, "live", True), (2.0, "live", False), (47.0, "dead", False)]
)
def test_a_silent_head_of_ray_is_named(seconds: float, lease: str, named: bool) -> None:
    status = {"ray_head": "10.0.0.7:6379", "ray_head_silent_seconds": seconds}
    workers = [{**one, "lease": lease, "status": status} for one in VIEW["workers"]]
    console = Console(file=io.StringIO(), width=200)
    console.print(render({**VIEW, "workers": workers}))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("Ray's head at 10.0.0.7:6379 has not responded for 47" in said) is named
    assert said.count("Ray's head") == int(named)


def test_a_cluster_that_handed_nothing_over_says_why() -> None:
    placement = {"calls": 12, "requests": 11, "no_handoff": "no prefill worker is ready"}
    console = Console(file=io.StringIO(), width=100)
    console.print(render({**VIEW, "placement": placement}))
    assert "no hand-offs: no prefill worker is ready" in console.file.getvalue()  # type: ignore[attr-defined]
    console = Console(file=io.StringIO(), width=100)
    console.print(render(VIEW))
    assert "no hand-offs" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "redis://user:p4ss@127.0.0.1:1/0",
            "at redis://***@127.0.0.1:1/0 (Request URL has an unsupported protocol",
        ),
        ("http://user:p4ss@127.0.0.1:1", "at http://***@127.0.0.1:1 ("),
        ("redis://h:1?password=p4ss", "at redis://h:1?password=*** ("),
        ("http://user:p4ss/w@h", "at http://*** (no valid URL)"),
    ],
)
def test_a_password_in_the_address_of_a_router_is_not_shown(url: str, shown: str) -> None:
    with RouterHttp(url) as router:
        with pytest.raises(UnavailableError) as caught:
            router.get("/v1/cluster")
        assert "p4ss" not in caught.value.message + router.address
        assert shown in caught.value.message


@pytest.mark.parametrize("router", [(200, json.dumps(VIEW).encode())], indirect=True)
@pytest.mark.parametrize(("terminal", "whole"), [(False, True), (True, False)])
def test_a_pipe_gets_whole_names(router: str, terminal: bool, whole: bool) -> None:
    """Names for `baton drain` are taken from there."""
    console = Console(file=io.StringIO(), width=50, force_terminal=terminal, color_system=None)
    show(router, as_json=False, console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all((one["id"] in said) is whole for one in VIEW["workers"])
    assert ("…" in said) is not whole
