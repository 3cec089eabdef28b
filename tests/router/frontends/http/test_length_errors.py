"""A prompt that is too long is refused by the name that its endpoint's clients have for it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.router.frontends.http.responses.conftest import scripted

__all__ = ["scripted"]
# Endpoint, the field with the prompt, and what else a request needs
PATHS: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/completions", "prompt", {}),
    ("/v1/chat/completions", "messages", {}),
    ("/v1/responses", "input", {}),
    ("/v1/messages", "messages", {"max_tokens": 4}),
    ("/v1/messages/count_tokens", "messages", {}),
    ("/v1/responses/input_tokens", "input", {}),
]
COUNTING = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")


@pytest.fixture(scope="module")
def client(scripted):
    with httpx.Client(base_url=scripted.url.removesuffix("/v1"), timeout=60) as made:
        yield made


def body_of(field: str, text: str) -> dict[str, Any]:
    return {field: [{"role": "user", "content": text}] if field == "messages" else text}


@pytest.mark.parametrize(("path", "field", "more"), PATHS, ids=[path for path, _, _ in PATHS])
def test_the_error_names_the_endpoints_field(client, scripted, path, field, more):
    room = scripted.first.validator.limits.max_model_len
    most = scripted.first.validator._most_text_bytes
    for text in ("a" * (most + 1), "a b c d " * (room // 3)):  # by its bytes, and by its tokens
        if path in COUNTING and len(text) <= most:
            continue  # as many tokens as there are
        answer = client.post(path, json={**body_of(field, text), **more})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].startswith(f"{field}: "), answer.text
        assert error.get("param", field) == field  # Anthropic's errors have none


def test_a_conversation_with_as_many_tokens_as_an_answer_may_have_is_refused_by_its_field(
    client, scripted, monkeypatch
):
    monkeypatch.setattr(scripted, "config", scripted.config.model_copy(update={"max_answer_entries": 5}))
    for field in ("prompt", "messages"):
        answer = client.post("/tokenize", json=body_of(field, "a b c d " * 20))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
