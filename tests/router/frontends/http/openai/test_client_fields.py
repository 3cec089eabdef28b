"""Request fields and settings of the HTTP frontend: what is accepted, its effect, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types import chat, completion_create_params, responses
from openai.types.shared_params import ReasoningEffort

from cluster.config.router import RouterConfig
from cluster.security.keys import ANYONE, Caller
from router.frontends.grpc.conversation import read_conversation
from router.frontends.http.openai.requests import (
    MAX_CACHE_SALT,
    ChatCompletionRequest,
    CompletionRequest,
    read_request,
)
from router.frontends.http.responses.request import ResponseRequest
from router.gateway import RequestGateway
from router.request.completion import Completion, prefix_scope
from router.request.limits import FieldLimits
from router.request.messages import read_messages
from tests.router.frontends.http.conftest import MESSAGES, NAME, PAGE
from wire import common_pb2, inference_pb2

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
    {"bad_words": ["x", " word"]},
    {"allowed_token_ids": [5, 6]},
    {"cache_salt": "mine"},
    {"best_of": 1},
    {"best_of": 2, "n": 2},
    {"best_of": None, "n": 2},
    {"reasoning_effort": None},
    {"stream_options": {"include_usage": True}},
    {"stream_options": None},
    {"priority": -5},
    {"max_completion_tokens": 2},
    {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "guided_decoding_backend": "auto",
    },
    {"chat_template": None, "documents": None, "allowed_token_ids": None, "add_special_tokens": None},
    {"moderation": None, "prompt_cache_options": {"mode": "explicit"}},
]
REFUSED = [
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"spaces_between_special_tokens": "no"}, "spaces_between_special_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"bad_words": ["x", ""]}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5] * (2**17 + 1)}, "allowed_token_ids"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * (MAX_CACHE_SALT + 1)}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"stream_options": {"include_everything": True}}, "stream_options"),
    ({"stream_options": {"continuous_usage_stats": 1}}, "continuous_usage_stats"),
    ({"stop": [""]}, "stop"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
]
TEXT: Any = SimpleNamespace(vocab_size=100, max_position_embeddings=64)
LIMITS = FieldLimits.of(RouterConfig(model="m", secret="x" * 16), TEXT)
BOTH: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "abcdef"},
    "chat/completions": {"messages": MESSAGES},
}


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


@pytest.mark.parametrize(
    ("parameters", "request_model"),
    [
        (chat.completion_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (responses.response_create_params.ResponseCreateParamsBase, ResponseRequest),
    ],
)
def test_every_parameter_of_the_package_is_known(parameters, request_model):
    """Supported or not: an error then says so, and not that the field is unknown."""
    assert set(parameters.__annotations__) <= request_model.names


def test_every_effort_of_the_package_is_known():
    """`max` as chat templates call the highest."""
    (efforts,) = (get_args(one) for one in get_args(ReasoningEffort) if one is not type(None))
    for effort in efforts:
        shown = "xhigh" if effort == "max" else effort
        body: dict[str, Any] = {"messages": MESSAGES, "reasoning_effort": effort}
        assert (
            read_request(ChatCompletionRequest, body, LIMITS).conversation(LIMITS).reasoning_effort == shown
        )
        asked = read_request(ResponseRequest, {"input": "a", "reasoning": {"effort": effort}}, LIMITS)
        assert asked.to_conversation(LIMITS).reasoning_effort == shown
        chat = inference_pb2.ChatMessages(reasoning_effort=effort)
        chat.messages.add(role="user", content="hi")
        assert read_conversation(chat, LIMITS).reasoning_effort == shown


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
    said = read_messages([{"role": "assistant", "content": None}], LIMITS)
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
    body = {"messages": MESSAGES, "truncate_prompt_tokens": value, "max_tokens": max_tokens}
    asked = read_request(ChatCompletionRequest, body, LIMITS)
    assert asked.kept(prompt, 16) == prompt[20 - kept :]


def test_prompts_share_prefixes_only_under_the_same_cache_salt():
    gateway = object.__new__(RequestGateway)
    gateway.config = RouterConfig(model="m", secret="x" * 16)
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
        return gateway._owned(completion, Caller(tenant) if tenant else ANYONE).prefix_scope

    assert len({scope(*pair) for pair in pairs}) == len(pairs)
    assert scope("t", "a") == scope("t", "a") == prefix_scope("t", "a")
    assert scope("t", "") == "t" and scope("", "") == ""
    gateway.config = gateway.config.model_copy(update={"share_prefixes_across_tenants": True})
    assert scope("t", "") == scope("u", "") == ""
    assert scope("t", "a") == scope("u", "a") != scope("u", "b")


# --- settings ------------------------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored_where_the_router_is_tolerant(router, tolerant):
    body = {"prompt": "abc", "max_tokens": 2, "top_a": 0.3, "stream_options": {"new": True}}
    refused = httpx.post(f"{router.http}/v1/completions", json={**body, "stream_options": None})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_a")
    assert httpx.post(f"{tolerant.http}/v1/completions", json=body).status_code == 200
    known = httpx.post(f"{tolerant.http}/v1/completions", json={**body, "suffix": "x"})
    assert (known.status_code, known.json()["error"]["param"]) == (400, "suffix")
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
def test_the_order_of_priority_numbers_is_a_setting(order, given, meant):
    limits = FieldLimits.of(RouterConfig(model="m", secret="x" * 16, priority_order=order), TEXT)
    asked = read_request(CompletionRequest, {"prompt": "a", "priority": given}, limits)
    assert (asked.priority or 0) == meant


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


def test_without_keys_a_page_of_another_origin_can_start_nothing(router, tolerant):
    """A form or a script of any site may post to loopback, as text/plain without a preflight."""
    body = json.dumps({"prompt": "abc", "max_tokens": 1})
    url, plain = "/v1/completions", {"content-type": "text/plain"}
    own = router.http.partition("://")[2]
    for origin, status in (("https://elsewhere.example", 403), ("null", 403), (f"http://{own}", 200)):
        answer = httpx.post(router.http + url, content=body, headers={**plain, "origin": origin})
        assert answer.status_code == status, origin
    assert httpx.post(tolerant.http + url, content=body, headers={**plain, "origin": PAGE}).status_code == 200
    refused = httpx.post(router.http + url, content=body, headers={**plain, "origin": PAGE})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "origin")


def test_without_keys_a_name_that_was_bound_to_loopback_reads_nothing(router, guarded):
    """DNS rebinding: the page's own name resolves to 127.0.0.1, so that the browser lets it read the answers."""
    running, _, admin = guarded
    for path in ("/v1/models", "/v1/cluster", "/metrics", "/ui", "/openapi.json", "/no/such"):
        refused = httpx.get(router.http + path, headers={"host": "rebound.example:8000"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "host"), path
    assert httpx.get(f"{router.http}/ready", headers={"host": "rebound.example"}).status_code == 200
    known = {"host": "rebound.example", "authorization": f"Bearer {admin}"}
    assert httpx.get(f"{running.http}/v1/cluster", headers=known).status_code == 200, "no page has a key"


def test_an_unknown_model_is_not_found(router, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"
