"""Large bodies: the cost of one before it is refused, and the memory that many of them hold."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import httpx
import psutil
import pytest
from tokenizers import AddedToken, Tokenizer

from baton.client import Client
from cluster.errors import OverloadedError
from tests.harness.router import KeyFile, Router
from tests.harness.waiting import wait_for
from tests.security.attacks.endpoints import CHATS, ENDPOINTS, PATHS, param
from tests.security.attacks.places_in_use import bearer, in_flight
from tests.security.attacks.probe import probed

MIB = 1 << 20
SIZE = 8 * MIB
# Of one turn of the event loop on a machine with other work; these bodies took up to 0.25 s when they were parsed.
STALL_SECONDS = 0.5


BODY_SECONDS = 8.0


@pytest.fixture(scope="module")
def settings(checkpoint: Any, tmp_path_factory: Any) -> dict[str, Any]:
    model = tmp_path_factory.mktemp("model") / "llama"
    shutil.copytree(checkpoint("llama"), model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    names = [f"<|reserved_special_token_{number}|>" for number in range(256)]
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in names])
    tokenizer.save(str(model / "tokenizer.json"))
    return {
        "model": str(model),
        "max_body_bytes_in_flight": 3 * SIZE,
        "max_body_bytes_in_flight_per_tenant": SIZE,
        "body_seconds": BODY_SECONDS,
    }


@pytest.fixture(scope="module")
def acme(keys: KeyFile) -> str:
    return keys.add("acme")


@pytest.fixture(scope="module")
def other(keys: KeyFile) -> str:
    return keys.add("other")


@pytest.fixture(scope="module")
def single(keys: KeyFile) -> str:
    return keys.add("single", max_concurrent_requests=1)


@pytest.fixture(scope="module")
def ops(keys: KeyFile) -> str:
    return keys.add("ops", admin=True)


@pytest.fixture(scope="module", autouse=True)
def known(router: Router, acme: str, other: str, single: str, ops: str) -> None:
    """The router looks at the file every half second."""
    for key in (acme, other, single, ops):
        wait_free(router, key)


def filled(before: str, one: str, after: str) -> bytes:
    return f"{before}{one * ((SIZE - 200) // len(one) - 1)}{one.rstrip(',')}{after}".encode()


def keyed() -> bytes:
    return ("{" + ",".join(f'"{i}":1' for i in range(600_000)) + "}").encode()


MESSAGE, PART = '{"role":"user","content":""},', '{"type":"text","text":""},'
BODIES: dict[str, Callable[[], bytes]] = {  # the endpoint's name first, where it is not that of completions
    "lists": lambda: filled('{"prompt":"a","metadata":[', "[],", "]}"),
    "objects": lambda: filled('{"prompt":"a","metadata":[', "{},", "]}"),
    "members": lambda: filled('{"prompt":"a","metadata":[', '{"a":1},', "]}"),
    "fields": keyed,
    "token ids": lambda: filled('{"prompt":[', "1,", "]}"),
    "ids to be cut": lambda: filled('{"truncate_prompt_tokens":4,"prompt":[', "1,", "]}"),
    "one value": lambda: filled('{"prompt":"a","seed":[', "[],", "]}"),
    "chat: messages": lambda: filled('{"messages":[', MESSAGE, "]}"),
    "chat: parts": lambda: filled('{"messages":[{"role":"user","content":[', PART, "]}]}"),
    "chat: tools": lambda: filled('{"messages":[],"tools":[', '{"type":"function"},', "]}"),
    "response: items": lambda: filled('{"input":[', MESSAGE, "]}"),
    "response: parts": lambda: filled('{"input":[{"role":"user","content":[', PART, "]}]}"),
    "response: calls": lambda: filled('{"input":[', '{"type":"function_call"},', "]}"),
    "response: include": lambda: filled('{"input":"a","include":[', "[],", "]}"),
    "message: messages": lambda: filled('{"max_tokens":1,"messages":[', MESSAGE, "]}"),
    "message: system": lambda: filled('{"messages":[],"system":[', PART, "]}"),
    "message: results": lambda: filled(
        '{"messages":[{"role":"user","content":[{"type":"tool_result","content":[', PART, "]}]}]}"
    ),
    "message: input": lambda: filled(
        '{"messages":[{"role":"assistant","content":[{"type":"tool_use","input":{"a":[', "{},", "]}}]}]}"
    ),
    "message: schema": lambda: filled('{"messages":[],"tools":[{"input_schema":{"enum":[', "[],", "]}}]}"),
    "embedding: ids": lambda: filled('{"input":[', "1,", "]}"),
    "embedding: inputs": lambda: filled('{"input":[', '"",', "]}"),
    "embedding: lists": lambda: filled('{"input":[', "[],", "]}"),
    "count: messages": lambda: filled('{"messages":[', MESSAGE, "]}"),
    "tokenize: prompt": lambda: filled('{"prompt":[', "[],", "]}"),
    "tokenize a chat: messages": lambda: filled('{"messages":[', MESSAGE, "]}"),
    "detokenize: ids": lambda: filled('{"tokens":[', "1,", "]}"),
    "detokenize: lists": lambda: filled('{"tokens":[', "[],", "]}"),
    "stop strings": lambda: filled('{"prompt":"a","stop":[', '"",', "]}"),
    "stop objects": lambda: filled('{"prompt":"a","stream_options":{"a":[', "{},", "]}}"),
    "deep": lambda: filled('{"prompt":"a","metadata":', "[", ""),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_many_elements_is_refused_and_the_loop_goes_on(
    name: str, router: Router, acme: str
) -> None:
    """Each was parsed: up to 0.25 s of the loop and 380 MiB."""
    path = ENDPOINTS[name.partition(":")[0] if ":" in name else "completion"].path
    with probed(router.http, router.pid) as probe:
        answer = httpx.post(f"{router.http}{path}", content=BODIES[name](), headers=bearer(acme), timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("the body "), (
        answer.text
    )
    assert probe.longest < STALL_SECONDS


@pytest.mark.parametrize("element", ["1e-320", '"é"'])
def test_the_costliest_body_blocks_the_loop_briefly(element: str, router: Router, acme: str) -> None:
    """As many elements as are allowed, of the kinds that the parser takes longest for."""
    body = f'{{"prompt":"a","max_tokens":1,"metadata":[{element}{f",{element}" * 116_000}]}}'.encode()
    assert len(body) < SIZE
    with probed(router.http, router.pid) as probe:
        answer = httpx.post(f"{router.http}/v1/completions", content=body, headers=bearer(acme), timeout=60)
    assert answer.status_code == 200, answer.text
    assert probe.longest < STALL_SECONDS


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("size", [SIZE - 300, 2 * MIB - 300])
def test_beginnings_of_special_tokens_do_not_stop_the_loop(
    size: int, name: str, router: Router, acme: str
) -> None:
    """Each special token was tried at each place of a content: 6 to 12 s for 8 MiB."""
    begin = "<|reserved_special_token_"
    asked = ENDPOINTS[name]
    body = asked.body(begin * (size // len(begin)))
    with probed(router.http, router.pid) as probe:
        answer = httpx.post(f"{router.http}{asked.path}", content=body, headers=bearer(acme), timeout=60)
    assert (answer.status_code, param(answer)) == (400, asked.field), answer.text
    assert probe.longest < STALL_SECONDS


MAX_WORK = 0.06  # seconds of the loop, most of them to parse the body


def test_a_refusal_s_text_is_rendered_on_a_thread(router: Router, acme: str) -> None:
    """Only parts of the type text were counted: 2 MiB of special tokens' texts took 0.12 s of the event loop."""
    part = {"type": "refusal", "refusal": "<|reserved_special_token_7|>" * (2 * MIB // 28)}
    body = {"input": [{"role": "assistant", "content": [part]}, {"role": "user", "content": "a"}]}
    found = []
    for _ in range(3):  # the best of them: threads that render take turns with the loop
        with probed(router.http, router.pid) as probe:
            answer = httpx.post(f"{router.http}/v1/responses", json=body, headers=bearer(acme), timeout=60)
        assert answer.status_code == 400, answer.text
        found.append(probe.most_work)
    assert min(found) < MAX_WORK


def nested(field: int, inner: bytes) -> bytes:
    """A field of length-delimited type (protobuf)."""
    size, length = len(inner), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + inner


EMPTY_FIELDS = 500_000  # longer messages are refused by their length
MESSAGES: dict[str, tuple[str, bytes]] = {
    "chat messages": ("Generate", nested(4, b"\x0a\x00" * EMPTY_FIELDS)),
    "stop strings": ("Generate", nested(5, b"\x5a\x00" * EMPTY_FIELDS)),
    "inputs": ("Embed", b"\x12\x00" * EMPTY_FIELDS),
    "tokenize": ("Tokenize", nested(3, b"\x0a\x00" * EMPTY_FIELDS)),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_many_fields_is_refused_and_the_loop_goes_on(
    name: str, router: Router, acme: str
) -> None:
    """Parsed, 8 MiB of them took 0.1 to 0.2 s of the loop and up to 216 MiB."""
    method, raw = MESSAGES[name]
    with probed(router.http, router.pid) as probe, grpc.insecure_channel(router.grpc) as channel:
        call = channel.unary_unary(f"/baton.v1.Inference/{method}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(raw, metadata=(("authorization", f"Bearer {acme}"),), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "65536 fields" in str(caught.value.details())
    assert probe.longest < STALL_SECONDS


ECHOED = {
    "model": ("completions", '{"prompt":"a","model":"', '"}'),
    "seed": ("completions", '{"prompt":"a","seed":"', '"}'),
    "messages[0].role": ("chat/completions", '{"messages":[{"role":"', '","content":"a"}]}'),
}


@pytest.mark.parametrize("field", ECHOED)
def test_an_error_does_not_repeat_all_that_was_sent(field: str, router: Router, acme: str) -> None:
    path, before, after = ECHOED[field]
    body = filled(before, r"\u0001", after)
    answer = httpx.post(f"{router.http}/v1/{path}", content=body, headers=bearer(acme), timeout=60)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == field
    assert len(answer.content) < 2_000


def test_an_unknown_field_s_name_is_cut(router: Router, acme: str) -> None:
    body = filled('{"prompt":"a","', "a", '":1}')
    answer = httpx.post(f"{router.http}/v1/completions", content=body, headers=bearer(acme), timeout=60)
    assert answer.status_code == 400 and len(answer.content) < 3_000


# --- before admission ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def begun(
    router: Router, key: str, sent: int = 0, size: int = SIZE, path: str = "/v1/completions"
) -> Iterator[socket.socket]:
    """A request of which the head and `sent` bytes of the body arrive."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {size}\r\n\r\n"
    with socket.create_connection(router.address, timeout=30) as sock:
        sock.sendall(head.encode())
        with contextlib.suppress(OSError):  # refused meanwhile
            sock.sendall(b'{"prompt":"' + b"a" * sent)
        yield sock


@contextlib.contextmanager
def silent_call(router: Router, key: str) -> Iterator[Any]:
    """A gRPC call whose message does not come."""
    done = threading.Event()

    def nothing() -> Iterator[bytes]:
        done.wait(60)
        yield from ()

    with grpc.insecure_channel(router.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        method = channel.stream_stream("/baton.v1.Inference/Generate", None, None)
        call = method(nothing(), metadata=(("authorization", f"Bearer {key}"),), timeout=60)
        try:
            yield call
        finally:
            call.cancel()
            done.set()


def ask(router: Router, key: str, prompt: str = "a") -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 1}
    return httpx.post(f"{router.http}/v1/completions", json=body, headers=bearer(key), timeout=60)


def ask_grpc(router: Router, key: str, prompt: str = "a") -> None:
    with Client(router.grpc, api_key=key, max_reconnects=0) as client:
        client.generate(prompt, max_tokens=1)


def wait_free(router: Router, key: str) -> None:
    wait_for(lambda: ask(router, key).status_code == 200, 30, "a place is free")


@pytest.mark.parametrize("occupy", [*(partial(begun, path=path) for path in PATHS), silent_call])
def test_a_place_is_taken_by_the_head(occupy: Any, router: Router, single: str, ops: str) -> None:
    """The tenant may have one request: while its body is on its way, the next head is refused."""
    wait_free(router, single)
    with occupy(router, single):
        wait_for(lambda: in_flight(router, ops) == 1, 30, "the place is taken")
        for path in PATHS:
            with begun(router, single, path=path) as second:
                answer = b""
                while b"}" not in answer:
                    answer += second.recv(1 << 16) or b"}"
            assert answer.startswith(b"HTTP/1.1 429") and b"this tenant has 1 requests" in answer
        with silent_call(router, single) as call, pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_free(router, single)


def test_many_bodies_at_once_are_held_within_the_budget(router: Router, acme: str, other: str) -> None:
    ask(router, acme)
    process = psutil.Process(router.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for path, _ in zip(itertools.cycle(PATHS), range(40), strict=False):
            stack.enter_context(begun(router, acme, 7 * MIB, path=path))
        grown = process.memory_info().rss - before
        assert grown < 60 * MIB, f"{grown / MIB:.0f} MiB"  # it was 40 x 7
        refused = ask(router, acme, "a" * 4 * MIB)
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "body")
        assert refused.headers["retry-after"] == "1"
        with pytest.raises(OverloadedError) as caught:
            ask_grpc(router, acme, "a" * 4 * MIB)
        assert (caught.value.field, caught.value.limit) == ("body", str(SIZE))
        # Requests of usual length, and other tenants' long ones, are served.
        assert ask(router, acme).status_code == 200
        ask_grpc(router, acme)
        assert "exceed a context" in ask(router, other, "a" * 4 * MIB).text
    wait_for(lambda: ask(router, acme, "a" * 4 * MIB).status_code == 400, 30, "the budget is free")


def test_a_message_that_does_not_come_counts_as_the_longest(router: Router, acme: str, ops: str) -> None:
    def counted() -> bool:
        with silent_call(router, acme):
            wait_for(lambda: in_flight(router, ops) == 1, 30, "the call has begun")
            while ask(router, acme, "a" * 4 * MIB).status_code != 429:
                if not in_flight(router, ops):
                    return False  # the router was late: the call's own time was over
            with silent_call(router, acme) as second, pytest.raises(grpc.RpcError) as caught:
                next(second)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            ask_grpc(router, acme)
            return True

    wait_for(counted, 30, "it is counted")
    wait_for(lambda: ask(router, acme, "a" * 4 * MIB).status_code == 400, 30, "the budget is free")


@pytest.mark.long
def test_a_message_has_time_as_a_body_has(router: Router, other: str) -> None:
    with silent_call(router, other) as call, pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert f"within {BODY_SECONDS:g} s" in str(caught.value.details())
