"""Requests as common clients send them, and streams as they read them: openai, guidellm, aiperf.

Behind the router are stub workers, which answer with one token again and again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import openai
import pytest
from starlette.requests import Request

from baton.client import Client
from cluster.auth.keys import ANYONE, Caller
from cluster.config import RouterConfig
from cluster.errors import ForbiddenError
from router.completion import Completion
from router.front import Front
from router.http import fields
from router.http.generate import Generate
from router.prefix_scope import prefix_scope
from tests.security.routers import KeyFile, Router, run_router, stub_workers, wait_ready
from wire import common_pb2, inference_pb2_grpc
from wire import inference_pb2 as pb

NAME = "tiny"
MESSAGES = [{"role": "user", "content": "hello"}]
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def start(checkpoint, redis_server, tmp_path_factory):
    """Routers with the settings given, one for each."""
    namespace, made = f"test-{secrets.token_hex(4)}", {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(stub_workers(redis_server.url, namespace))

        def start(**settings: Any) -> Router:
            key = json.dumps(settings, sort_keys=True)
            if key not in made:
                config = {
                    "model": str(checkpoint("llama")),
                    "served_model_name": NAME,
                    "namespace": namespace,
                }
                config |= {"redis_url": redis_server.url, **settings}
                made[key] = stack.enter_context(run_router(tmp_path_factory.mktemp("router"), config))
                wait_ready(made[key].http)
            return made[key]

        yield start


@pytest.fixture(scope="module")
def router(start):
    return start()


@pytest.fixture(scope="module")
def client(router):
    with openai.OpenAI(base_url=f"{router.http}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tolerant(start):
    return start(unknown_fields="ignore", priority_order="lower_first", cors_origins=[PAGE])


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest.fixture(scope="module")
def guarded(start, keys):
    """A router that asks for keys, a tenant's and an admin's key."""
    tenant, admin = keys.add("acme"), keys.add("ops", admin=True)
    return start(api_keys_file=str(keys.path), cors_origins=[PAGE]), tenant, admin


def events_of(url: str, body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    answer = httpx.post(url, json=body, timeout=60, **more)
    assert answer.status_code == 200, answer.text
    payloads = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


# --- the end of a stream -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_the_usual_loop_reads_a_whole_chat(n, client):
    said = [""] * n
    finished: list[int] = []
    for chunk in client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=5, n=n, stream=True
    ):
        choice = chunk.choices[0]  # as every tutorial reads it
        assert choice.index not in finished
        said[choice.index] += choice.delta.content
        if choice.finish_reason is not None:
            finished.append(choice.index)
        last_of_all = len(finished) == n
        assert ("baton" in chunk.model_extra) == last_of_all
        assert chunk.usage is None
    assert sorted(finished) == list(range(n))
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=5, n=n)
    assert said == [choice.message.content for choice in whole.choices]
    assert set(chunk.model_extra["baton"]) == set(whole.model_extra["baton"])


def test_the_usual_loop_reads_a_whole_completion_of_two_prompts(client):
    chunks = list(client.completions.create(model=NAME, prompt=["ab", "cd"], max_tokens=4, stream=True))
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes.count("length") == 2 and finishes[-1] == "length"
    assert ["baton" in chunk.model_extra for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_usage_comes_in_a_chunk_of_its_own_where_it_is_asked_for(client):
    ask = {"model": NAME, "messages": MESSAGES, "max_tokens": 5, "n": 2}
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert [len(chunk.choices) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage == client.chat.completions.create(**ask).usage
    assert chunks[-1].usage.completion_tokens == 10
    assert ["baton" in chunk.model_extra for chunk in chunks].index(True) == len(chunks) - 2


def test_the_only_token_comes_before_what_the_workers_report(router):
    body = {"prompt": "abc", "max_tokens": 1, "stream": True, "return_token_ids": True}
    first, last = events_of(f"{router.http}/v1/completions", body)
    assert (len(first["choices"][0]["token_ids"]), first["choices"][0]["finish_reason"]) == (1, None)
    assert (last["choices"][0]["token_ids"], last["choices"][0]["finish_reason"]) == ([], "length")
    assert last["choices"][0]["text"] == ""


@pytest.mark.parametrize("include", [False, True])
def test_usage_so_far_is_in_every_chunk(include, router):
    options = {"include_usage": include, "continuous_usage_stats": True}
    body = {"prompt": ["abc", "abcdef"], "max_tokens": 4, "n": 2, "stream": True, "stream_options": options}
    events = events_of(f"{router.http}/v1/completions", body)
    with_choices = [event for event in events if event["choices"]]
    assert len(events) - len(with_choices) == include
    counted = [event["usage"]["completion_tokens"] for event in with_choices]
    assert counted == sorted(counted) and counted[0] == 1 and counted[-1] == 16
    prompts = {event["usage"]["prompt_tokens"] for event in events}
    assert prompts == {
        httpx.post(f"{router.http}/v1/completions", json={**body, "stream": False}).json()["usage"][
            "prompt_tokens"
        ]
    }
    for event in events:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


# --- benchmarks' requests, recorded from their own code -----------------------------------------------------------

GUIDELLM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
GUIDELLM = [
    (
        "chat/completions",
        {
            "model": NAME,
            "stream": True,
            "stream_options": GUIDELLM_OPTIONS,
            "max_completion_tokens": 6,
            "stop": None,
            "ignore_eos": True,
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            ],
        },
    ),
    (
        "completions",
        {
            "model": NAME,
            "stream": True,
            "stream_options": GUIDELLM_OPTIONS,
            "max_tokens": 6,
            "stop": None,
            "ignore_eos": True,
            "prompt": "hello",
        },
    ),
    (  # of its versions before 0.4
        "completions",
        {
            "prompt": "hello",
            "model": NAME,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 6,
            "max_completion_tokens": 6,
            "stop": None,
            "ignore_eos": True,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), GUIDELLM)
def test_guidellm(path, body, router):
    """Its reader takes the first choice where there is one, and the last usage that came."""
    said, usage = "", None
    for event in events_of(f"{router.http}/v1/{path}", body):
        choice = event["choices"][0] if event["choices"] else {}
        said += choice.get("text") or choice.get("delta", {}).get("content") or ""
        usage = event.get("usage") or usage
    assert said and usage["completion_tokens"] == 6


AIPERF = [
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "name": "text", "content": "hello"}],
            "model": NAME,
            "stream": True,
            "max_completion_tokens": 6,
            "ignore_eos": True,
            "min_tokens": 6,
        },
    ),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "model": NAME,
            "stream": True,
            "max_completion_tokens": 6,
        },
    ),
    ("completions", {"prompt": ["hello"], "model": NAME, "stream": True, "max_tokens": 6}),
]


@pytest.mark.parametrize(("path", "body"), AIPERF)
def test_aiperf(path, body, router):
    """Its parser reads `choices[0]` of every event."""
    pieces = []
    for event in events_of(f"{router.http}/v1/{path}", body):
        assert event["object"] in ("chat.completion.chunk", "text_completion")
        choice = event["choices"][0]
        pieces.append(choice.get("text") or choice.get("delta", {}).get("content"))
    assert sum(1 for piece in pieces if piece) == 6


# --- fields --------------------------------------------------------------------------------------------------------

ACCEPTED = [
    {"stop": ""},
    {"stop": None},
    {"skip_special_tokens": True},
    {"skip_special_tokens": None},
    {"spaces_between_special_tokens": True},
    {"spaces_between_special_tokens": False},
    {"truncate_prompt_tokens": None},
    {"truncate_prompt_tokens": 3},
    {"truncate_prompt_tokens": -1},
    {"bad_words": []},
    {"cache_salt": "mine"},
    {"best_of": 1},
    {"best_of": 2, "n": 2},
    {"best_of": None, "n": 2},
    {"reasoning_effort": None},
    {"stream_options": {"include_usage": True}},
    {"stream_options": None},
    {"priority": -5},
    {"max_completion_tokens": 2},
]
REFUSED = [
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"spaces_between_special_tokens": "no"}, "spaces_between_special_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * (fields.MAX_CACHE_SALT + 1)}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"stream_options": {"include_everything": True}}, "stream_options"),
    ({"stream_options": {"continuous_usage_stats": 1}}, "continuous_usage_stats"),
    ({"stop": [""]}, "stop"),
]
BOTH = {"completions": {"prompt": "abcdef"}, "chat/completions": {"messages": MESSAGES}}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("body", ACCEPTED, ids=json.dumps)
def test_neutral_and_common_values_pass(path, body, router):
    answer = httpx.post(f"{router.http}/v1/{path}", json={"max_tokens": 2, **BOTH[path], **body})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(("body", "field"), REFUSED, ids=json.dumps)
def test_a_value_that_would_change_the_answer_is_refused(path, body, field, router):
    answer = httpx.post(f"{router.http}/v1/{path}", json={"max_tokens": 2, **BOTH[path], **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_reasoning_effort_belongs_to_chats(router):
    chat, text = f"{router.http}/v1/chat/completions", f"{router.http}/v1/completions"
    body = {"max_tokens": 2, "reasoning_effort": "low"}
    assert httpx.post(chat, json={**body, "messages": MESSAGES}).status_code == 200
    for url, asked in (
        (text, {**body, "prompt": "a"}),
        (chat, {"messages": MESSAGES, "reasoning_effort": "hard"}),
    ):
        answer = httpx.post(url, json=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


def test_an_assistants_turn_may_have_no_content(client):
    turn = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=1).choices[0].message
    empty = turn.model_copy(update={"content": None})
    for assistant in (empty.model_dump(), {"role": "assistant"}, {"role": "assistant", "content": None}):
        chat = [*MESSAGES, assistant, {"role": "user", "content": "go on"}]
        assert client.chat.completions.create(model=NAME, messages=chat, max_tokens=1).choices
    said = fields.messages({"messages": [{"role": "assistant", "content": None}]})
    assert said == [{"role": "assistant", "content": ""}]
    for wrong in (
        {"role": "user", "content": None},
        {"role": "assistant", "content": 5},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=NAME, messages=[wrong], max_tokens=1)


def test_truncation_keeps_the_prompts_end(client):
    def tokens(**more: Any) -> int:
        answer = client.completions.create(model=NAME, prompt=[5, 6, 7, 8, 9], max_tokens=2, extra_body=more)
        return answer.usage.prompt_tokens

    assert tokens() == 5
    assert tokens(truncate_prompt_tokens=3) == 3
    assert tokens(truncate_prompt_tokens=9) == 5


@pytest.mark.parametrize(
    ("value", "max_tokens", "kept"),
    [(None, 4, 20), (3, 4, 3), (16, 4, 16), (-1, None, 15), (-1, 4, 12), (-1, 99, 1)],
)
def test_how_much_truncation_keeps(value, max_tokens, kept):
    prompt = list(range(20))
    left = fields.truncated({"truncate_prompt_tokens": value}, prompt, 16, max_tokens)
    assert left == prompt[20 - kept :]


def test_prompts_share_prefixes_only_under_the_same_cache_salt():
    front = object.__new__(Front)
    front.config = RouterConfig(model="m", secret="x" * 16)
    pairs = [
        ("", ""),
        ("", "a"),
        ("", "b"),
        ("t", ""),
        ("t", "a"),
        ("ta", ""),
        ("ta", "b"),
        ("t", "ab"),
        ("u", "a"),
        ("1:t", "a"),
        ("t", "a1:"),
    ]

    def scope(tenant: str, salt: str) -> str:
        completion = Completion("r", NAME, [1], common_pb2.SamplingParams(), cache_salt=salt)
        return front._owned(completion, Caller(tenant) if tenant else ANYONE).prefix_scope

    assert len({scope(*pair) for pair in pairs}) == len(pairs)
    assert scope("t", "a") == scope("t", "a") == prefix_scope("t", "a")
    assert scope("t", "") == "t" and scope("", "") == ""
    front.config = front.config.model_copy(update={"share_prefixes_across_tenants": True})
    assert scope("t", "") == scope("u", "") == ""
    assert scope("t", "a") == scope("u", "a") != scope("u", "b")


# --- settings ------------------------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored_where_the_router_says_so(router, tolerant):
    body = {"prompt": "abc", "max_tokens": 2, "top_a": 0.3, "stream_options": {"new": True}}
    refused = httpx.post(f"{router.http}/v1/completions", json={**body, "stream_options": None})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_a")
    assert httpx.post(f"{tolerant.http}/v1/completions", json=body).status_code == 200
    known = httpx.post(f"{tolerant.http}/v1/completions", json={**body, "echo": True})
    assert (known.status_code, known.json()["error"]["param"]) == (400, "echo")
    schema = httpx.get(f"{tolerant.http}/openapi.json").json()["components"]["schemas"]
    assert schema["CompletionRequest"]["additionalProperties"] is True
    schema = httpx.get(f"{router.http}/openapi.json").json()["components"]["schemas"]
    assert schema["CompletionRequest"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("order", "given", "meant"),
    [
        ("higher_first", 5, 5),
        ("higher_first", None, 0),
        ("higher_first", "high", 1),
        ("lower_first", 5, -5),
        ("lower_first", -5, 5),
        ("lower_first", None, 0),
        ("lower_first", "high", 1),
        ("lower_first", "batch", -1),
    ],
)
def test_whose_numbers_a_priority_is_given_in(order, given, meant):
    front = SimpleNamespace(config=RouterConfig(model="m", secret="x" * 16, priority_order=order))
    request = Request({"type": "http", "headers": []})
    asked = Generate(front)._asked(request, {"prompt": "a", "priority": given}, None, 2)
    assert asked.priority == meant


def test_a_priority_that_is_no_number_is_refused_in_either_order(router, tolerant):
    for running in (router, tolerant):
        for wrong in (True, 1.5, "urgent", 2**20):
            body = {"prompt": "a", "max_tokens": 1, "priority": wrong}
            answer = httpx.post(f"{running.http}/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_a_page_of_an_allowed_origin_may_ask(router, guarded):
    running, tenant, _ = guarded
    url, page = f"{running.http}/v1/completions", {"origin": PAGE}
    asked = httpx.options(url, headers={**page, **PREFLIGHT})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in asked.headers
    body = {"prompt": "abc", "max_tokens": 1}
    answer = httpx.post(url, json=body, headers={**page, "authorization": f"Bearer {tenant}"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    refused = httpx.post(url, json=body, headers=page)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    other = httpx.options(url, headers={"origin": "https://elsewhere.example", **PREFLIGHT})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    plain = httpx.options(f"{router.http}/v1/completions", headers={**page, **PREFLIGHT})
    assert plain.status_code == 405 and "access-control-allow-origin" not in plain.headers


def test_an_unknown_model_is_not_found(router, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


# --- what only admins see ------------------------------------------------------------------------------------------

INSIDE = {
    "prefill_worker",
    "decode_worker",
    "router_queue_seconds",
    "prefill_queue_seconds",
    "decode_queue_seconds",
}


def test_workers_and_queues_are_shown_to_admins_alone(router, guarded):
    running, tenant, admin = guarded

    def ask(running: Router, key: str = "", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"prompt": "abc", "max_tokens": 2, **more}
        return httpx.post(f"{running.http}/v1/completions", json=body, headers=headers)

    for answer, shown in ((ask(running, tenant), False), (ask(running, admin), True), (ask(router), True)):
        assert INSIDE & set(answer.json()["baton"]) == (INSIDE if shown else set())
        assert ("x-baton-decode-worker" in answer.headers) == shown
        assert ("stub-decode" in answer.text) == shown
        assert answer.json()["baton"]["kv_bytes_shipped"] > 0
    for key, shown in ((tenant, False), (admin, True)):
        answer = ask(running, key, stream=True)
        assert ("stub-decode" in answer.text) == shown
        assert '"total_seconds"' in answer.text


def test_grpc_shows_them_to_admins_alone(guarded):
    running, tenant, admin = guarded
    for key, shown in ((tenant, False), (admin, True)):
        with Client(running.grpc, api_key=key) as client:
            stream = client.stream("abc", max_tokens=2)
            assert len(list(stream)) > 0
            assert bool(stream.worker_ids) == shown
            timings = stream.timings
            assert bool(timings.decode_worker) == bool(timings.router_queue_seconds) == shown
            assert timings.total_seconds > 0
            if shown:
                assert client.generate("abc", max_tokens=2, explain=True).explanation
            else:
                with pytest.raises(ForbiddenError, match="explain"):
                    client.generate("abc", max_tokens=2, explain=True)
    with grpc.insecure_channel(running.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(text="abc", explain=True), metadata=[("authorization", f"Bearer {tenant}")]
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
