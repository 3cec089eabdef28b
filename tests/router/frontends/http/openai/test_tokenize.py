"""`/tokenize` and `/detokenize` in vLLM's shapes; they take places and count in quotas."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness.waiting import wait_for
from tests.router.frontends.http.responses.conftest import scripted

__all__ = ["scripted"]
CHAT: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(scripted):
    with httpx.Client(base_url=scripted.url.removesuffix("/v1"), timeout=60) as made:
        yield made


def test_a_text_there_and_back(scripted, client):
    made = client.post("/tokenize", json={"model": "tiny", "prompt": "Once upon a time"}).json()
    assert made["tokens"] == scripted.first.text.tokenizer.encode("Once upon a time").ids
    assert made["count"] == len(made["tokens"]) and made["token_strs"] is None
    assert made["max_model_len"] == scripted.first.validator.limits.max_model_len
    plain = client.post(
        "/tokenize",
        json={"prompt": "Once upon a time", "add_special_tokens": False, "return_token_strs": True},
    ).json()
    assert len(plain["token_strs"]) == plain["count"]
    back = client.post("/detokenize", json={"tokens": plain["tokens"]})
    assert back.json() == {"prompt": "Once upon a time"}


def test_a_chat_has_the_tokens_of_its_prompt(scripted, client):
    scripted.script([])
    made = client.post("/tokenize", json={"messages": CHAT}).json()
    client.post("/v1/chat/completions", json={"messages": CHAT})
    assert made["tokens"] == scripted.accepted[0].prompt_tokens
    shorter = client.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
    assert shorter["count"] < made["count"]


def test_a_chat_is_cut_as_its_prompt(scripted, client):
    """Also one that would not fit the context."""
    long = [{"role": "user", "content": "word " * 2 * scripted.first.validator.limits.max_model_len}]
    for messages, cut in ((CHAT, 3), (long, 3), (long, -1)):
        scripted.script([])
        body = {"messages": messages, "truncate_prompt_tokens": cut, "max_tokens": 7}
        made = client.post("/tokenize", json=body).json()
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert made["tokens"] == scripted.accepted[0].prompt_tokens
        assert made["count"] == len(made["tokens"])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {"prompt": "word " * 100_000}, "prompt"),
    ("/tokenize", {"prompt": "a", "x": 1}, "x"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens"),
    ("/detokenize", {"tokens": [0] * 100_000}, "tokens"),
]


def test_refusals_name_their_fields(client):
    for path, body, field in REFUSED:
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (path, answer.text)
    assert client.post("/tokenize", json={"prompt": "a", "model": "other"}).status_code == 404


def test_a_clients_request_id_is_checked_and_shown(client):
    for name, status in (("mine", 200), ("x" * 257, 400)):
        answer = client.post("/detokenize", json={"tokens": [5]}, headers={"x-request-id": name})
        assert answer.status_code == status
    assert (
        client.post("/tokenize", json={"prompt": "a"}, headers={"x-request-id": "m"}).headers["x-request-id"]
        == "m"
    )


def test_they_take_a_place_and_are_counted(scripted, client, monkeypatch):
    seen = []
    counted = type(scripted).counted

    def counting(self, caller, model):
        seen.append(self.admission.in_flight)
        return counted(self, caller, model)

    monkeypatch.setattr(type(scripted), "counted", counting)
    client.post("/tokenize", json={"prompt": "a"})
    client.post("/detokenize", json={"tokens": [5]})
    client.post("/v1/messages/count_tokens", json={"messages": CHAT})
    client.post("/v1/responses/input_tokens", json={"input": CHAT})
    assert seen == [1, 1, 1, 1]
    # The last place is given back after its answer was sent.
    wait_for(lambda: scripted.admission.in_flight == 0, 10.0, "the place is free")


def test_a_prompt_or_messages_that_are_null_are_missing(client):
    """vLLM's clients write out both."""
    for given, other in (({"prompt": "hi"}, "messages"), ({"messages": CHAT}, "prompt")):
        made = client.post("/tokenize", json={**given, other: None})
        assert made.json() == client.post("/tokenize", json=given).json(), made.text
        assert made.status_code == 200
    for body, field in (({"messages": None}, "messages"), ({"messages": CHAT, "prompt": "hi"}, "prompt")):
        refused = client.post("/tokenize", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


def test_no_grammar_is_made_where_nothing_is_generated(scripted, client, monkeypatch):
    """Of tools whose calls must match: a schema that has no grammar changes no prompt."""
    checked: list[str] = []

    async def check(tenant: str, *asked: Any) -> None:
        checked.extend(one.field for one in asked)

    monkeypatch.setattr(scripted.first.grammars, "check", check)
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    body = {
        "messages": CHAT,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    tools = [{"name": "f", "input_schema": schema, "strict": True}]
    counted = {"messages": CHAT, "tools": tools, "tool_choice": {"type": "any"}}
    of_response = {"input": CHAT, "tools": [{"type": "function", **function}], "tool_choice": "required"}
    for path, asked in (
        ("/tokenize", body),
        ("/v1/messages/count_tokens", counted),
        ("/v1/responses/input_tokens", of_response),
    ):
        made = client.post(path, json=asked)
        assert (made.status_code, checked) == (200, []), made.text
        refused = client.post(path, json={**asked, "tools": []})
        assert refused.status_code == 400 and "needs tools" in refused.text
    scripted.script([])
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert checked[-1] == "tool_choice"
