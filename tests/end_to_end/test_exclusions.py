"""`allowed_token_ids` and `bad_words` through whole clusters."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from baton.client import Client
from cluster.errors import DeadEndError, InvalidRequestError
from engine.request import SamplingParams
from tests.end_to_end.conftest import Cluster, run_cluster
from tests.end_to_end.handover import PROCESS, assert_all_free, pid_of
from tests.engine.sampling.grammar.grammars import bitmap, tokens_of
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge
from tests.harness.model_text import VOCAB

ABC = tokens_of("abc")
LETTERS, WORDS = tokens_of("abcdef"), ["ab", "bcd", "ff", " e", "de"]
MANY = 900


@pytest.fixture(scope="module")
def cluster(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("exclusions"), checkpoint("llama"), *PROCESS) as running:
        yield running


def post(cluster: Cluster, path: str, **fields: Any) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "abc"}
    return httpx.post(f"{cluster.http}/v1/{path}", json={**prompt, "max_tokens": 24, **fields}, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_allowed_tokens_and_no_bad_word(cluster: Cluster, stream: bool) -> None:
    """After an `a`, which begins `ab`, only `a` is left: `c` is a word by itself."""
    fields = {"allowed_token_ids": ABC, "bad_words": ["ab", " c"], "temperature": 1.0, "seed": 4}
    found = set()
    for path in ("completions", "chat/completions"):
        for seed in range(5):
            answer = post(cluster, path, **{**fields, "seed": seed}, stream=stream)
            assert answer.status_code == 200, answer.text
            text = "".join(re.findall(r'"(?:text|content)": ?"([^"]*)"', answer.text))
            assert re.fullmatch("b*a*", text) and len(text) == 24, text
            found.add(text)
    assert len(found) > 2


def test_grpc_and_http_give_the_same_answer(cluster: Cluster) -> None:
    fields: dict[str, Any] = {"allowed_token_ids": LETTERS, "bad_words": WORDS, "temperature": 1.0, "seed": 3}
    with Client(cluster.grpc) as client:
        answer = client.generate("abc", max_tokens=24, **fields)
        free = client.generate("abc", max_tokens=24, temperature=1.0, seed=3)
    whole = post(cluster, "completions", **fields, return_token_ids=True).json()["choices"][0]
    assert whole["token_ids"] == list(answer.token_ids) and whole["finish_reason"] == "length"
    assert set(answer.token_ids) <= set(LETTERS) and not set(free.token_ids) <= set(LETTERS)
    assert not any(word.strip() in answer.text for word in WORDS)


def test_several_prompts_and_choices_share_what_is_excluded(cluster: Cluster) -> None:
    answer = post(
        cluster, "completions", prompt=["a", [5, 6]], n=2, allowed_token_ids=ABC, bad_words=["c"], seed=1
    ).json()
    texts = [one["text"] for one in answer["choices"]]
    assert len(texts) == 4 and all(re.fullmatch("[ab]{24}", text) for text in texts)


def test_with_a_grammar_answers_match_it(cluster: Cluster) -> None:
    fields = {"guided_regex": "[a-z]{4,8}", "allowed_token_ids": [*LETTERS, 2], "bad_words": WORDS}
    for seed in range(6):
        (choice,) = post(cluster, "completions", **fields, seed=seed).json()["choices"]
        assert choice["finish_reason"] == "stop" and re.fullmatch("[a-f]{4,8}", choice["text"])
        assert not any(word.strip() in choice["text"] for word in WORDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"guided_regex": "[x-z]+"}])
def test_a_request_without_any_token_left_says_so(
    cluster: Cluster, more: dict[str, Any], stream: bool
) -> None:
    """At the first token, and in the middle of an answer."""
    code = "grammar_dead_end" if more else "dead_end"
    for words in (["a"], ["aaaa"]):
        answer = post(
            cluster, "completions", allowed_token_ids=ABC[:1], bad_words=words, stream=stream, **more
        )
        assert f'"{code}"' in answer.text.replace(" ", "")
        assert answer.status_code in ((200, 400) if stream else (400,))
    with Client(cluster.grpc) as client, pytest.raises(DeadEndError) as caught:
        client.generate("abc", allowed_token_ids=ABC[:1], bad_words=["a"], max_tokens=4)
    assert caught.value.field == "allowed_token_ids"
    assert_all_free(cluster)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a", "\n"]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    cluster: Cluster, fields: dict[str, Any], field: str
) -> None:
    for path in ("completions", "chat/completions"):
        answer = post(cluster, path, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    if -1 not in fields.get("allowed_token_ids", ()):
        with Client(cluster.grpc) as client, pytest.raises(InvalidRequestError) as caught:
            client.generate("abc", max_tokens=2, **fields)
        assert caught.value.field == field


@pytest.mark.long
@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_answers_are_the_same_wherever_they_are_computed(
    checkpoint: Any, start_cluster: Any, speculation: str
) -> None:
    """Handed over, after the decode worker was killed, and by one worker alone; the reference masks logits token by
    token."""
    model, prompt = checkpoint("llama"), prompt_ids(60, seed=9)
    running = start_cluster(model, *PROCESS, "--prefill", "2", "--decode", "2", "--speculation", speculation)
    options: dict[str, Any] = {
        "max_tokens": MANY,
        "seed": 5,
        "temperature": 1.0,
        "allowed_token_ids": LETTERS,
        "bad_words": WORDS,
    }
    with Client(running.grpc) as client:
        undisturbed = client.generate(prompt, **options)
        assert undisturbed.timings.kv_bytes_shipped > 0 and len(undisturbed.token_ids) == MANY
        stream = client.stream(prompt, **options)
        for _ in range(5):
            next(stream)
        os.kill(pid_of(running, "decode", stream.worker_ids), signal.SIGKILL)
        for _ in stream:
            pass
        answer = stream.completion()
    assert answer.timings.attempts == 2
    params = SamplingParams(
        temperature=1.0,
        seed=5,
        allowed_tokens=bitmap(LETTERS),
        bad_words=tuple(tuple(tokens_of(word.strip())) for word in WORDS),
    )
    alone = start_cluster(model, *PROCESS, "--local-prefill", "always", "--speculation", speculation)
    with Client(alone.grpc) as client:
        local = client.generate(prompt, **options)
    for one in (undisturbed, answer, local):
        assert not judge(model, prompt, list(one.token_ids), params).wrong
        assert not any(word.strip() in one.text for word in WORDS)
