"""Streams as common clients read them, and requests as they send them: openai, guidellm, aiperf."""

from __future__ import annotations

import httpx
import pytest

from tests.router.frontends.http.conftest import MESSAGES, NAME, events_of

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
def test_guidellm_finds_text_and_usage(path, body, router):
    """Its client reads the first choice of a chunk, if there is one, and keeps the last usage."""
    said = ""
    usage: dict[str, int] = {}
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
def test_aiperf_finds_a_choice_in_every_event(path, body, router):
    """Its parser reads `choices[0]` of every event."""
    pieces = []
    for event in events_of(f"{router.http}/v1/{path}", body):
        assert event["object"] in ("chat.completion.chunk", "text_completion")
        choice = event["choices"][0]
        pieces.append(choice.get("text") or choice.get("delta", {}).get("content"))
    assert sum(1 for piece in pieces if piece) == 6
