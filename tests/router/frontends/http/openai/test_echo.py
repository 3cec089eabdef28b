"""`echo`: prompts before their answers, and `max_tokens: 0`, which computes prompts only."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest

from cluster.config.router import RouterConfig
from cluster.errors import ContextLengthError, InvalidRequestError
from cluster.protocol.first_token import ends_with_first_token
from router.frontends.http.openai.echo import EchoForm
from router.frontends.http.openai.generate import ShapeForm
from router.frontends.http.openai.requests import CompletionRequest, StreamOptions, read_request
from router.frontends.http.openai.shapes import CompletionShape
from router.request.completion import Delta, Outcome
from router.request.validator import Envelope, Validator
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway, served
from tests.router.frontends.http.conftest import NAME, events_of
from tests.router.frontends.http.small_text import TEXT
from wire import common_pb2, inference_pb2

CONFIG = RouterConfig(model="m", secret="x" * 16, max_answer_entries=1000, max_choices=100)


def completion(**body):
    validator = Validator(CONFIG, TEXT)
    options = read_request(
        CompletionRequest, {"prompt": [5, 6, 7, 8], "echo": True, **body}, validator.limits
    )
    return validator.completion([5, 6, 7, 8], options, Envelope("r"))


def test_the_prompt_precedes_every_choice(client):
    plain = client.completions.create(model=NAME, prompt=["ab", "cd"], n=2, max_tokens=3)
    echoed = client.completions.create(model=NAME, prompt=["ab", "cd"], n=2, max_tokens=3, echo=True)
    prompts = ["ab", "ab", "cd", "cd"]
    assert [one.text for one in echoed.choices] == [
        prompt + one.text for prompt, one in zip(prompts, plain.choices, strict=True)
    ]
    assert echoed.usage.completion_tokens == plain.usage.completion_tokens


def test_a_prompt_of_tokens_is_echoed_as_text(client):
    ids, more = [40, 41, 42], {"model": NAME, "max_tokens": 0, "echo": True}
    whole = client.completions.create(prompt=ids, **more)
    assert whole.choices[0].text
    cut = client.completions.create(prompt=[39, *ids], extra_body={"truncate_prompt_tokens": 3}, **more)
    assert cut.choices[0].text == whole.choices[0].text


def test_without_tokens_the_prompt_is_the_answer(client):
    answer = client.completions.create(model=NAME, prompt="abc", max_tokens=0, echo=True, stop="x", n=2)
    assert [(one.text, one.finish_reason) for one in answer.choices] == [("abc", "length")] * 2
    assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens > 0


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_stream_begins_with_the_prompt(router, max_tokens):
    body = {
        "prompt": "abc",
        "max_tokens": max_tokens,
        "echo": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = events_of(f"{router.http}/v1/completions", {**body, "stream": True})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    whole = httpx.post(
        f"{router.http}/v1/completions", json={"seed": 1, **body, "stream_options": None}
    ).json()
    assert texts[0] == "abc" and "".join(texts) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == max_tokens


def test_long_prompts_of_a_stream_are_made_one_by_one():
    """Sixty-four choices of 12 MB in all were one write, to a client that reads nothing."""
    asked, text = completion(max_tokens=0, n=16), "x" * 50_000
    made = []

    class Form:
        def streamed(self, choices):
            def of(deltas):
                made.append(len(deltas))
                return b"".join(one.echo + one.text.encode() for one in deltas)

            return SimpleNamespace(of=of, kept=0)

    inner: Any = Form()
    form = EchoForm(inner, [asked], [text])
    ends = [Delta(choice, "", (), "length") for choice in range(16)]
    written: Any = form.streamed(16).of(ends)
    assert made == []
    assert [len(piece) for piece in written] == [50_000] * 16 and made == [1] * 16
    short = EchoForm(inner, [asked], ["abc"]).streamed(16)
    assert short.of(ends) == b"abc" * 16 and made[16:] == [16]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_is_echoed_as_it_is(client, max_tokens):
    """It is put into the answer as JSON that is made once."""
    prompt = 'a "quoted"\n\x00\\ é \U0001f600' * 10
    more: Any = {"model": NAME, "max_tokens": max_tokens, "n": 2, "seed": 1}
    plain = ["", ""]
    if max_tokens:
        plain = [one.text for one in client.completions.create(prompt=prompt, **more).choices]
    whole = client.completions.create(prompt=prompt, echo=True, **more)
    assert [one.text for one in whole.choices] == [prompt + text for text in plain]
    texts = ["", ""]
    for chunk in client.completions.create(prompt=prompt, echo=True, stream=True, **more):
        for one in chunk.choices:
            texts[one.index] += one.text
    assert texts == [prompt + text for text in plain]


def test_choices_of_one_prompt_share_its_json():
    """With 16 choices, 4 prompts of 200 KB gave 12 MB of JSON, because each choice encoded its prompt again."""
    asked = [completion(max_tokens=1, n=16) for _ in range(2)]
    shape: Any = CompletionShape(asked[0], TEXT, 0, "cmpl-1", False)
    made = EchoForm(ShapeForm(shape, StreamOptions(), 8), asked, ["x" * 50_000, "y" * 50_000]).whole(32)
    for choice in range(32):
        made.add([Delta(choice, "b", (), "length")])
    outcome = Outcome(inference_pb2.Usage(), inference_pb2.Timings())
    pieces = made.body([outcome])
    shown = json.loads(b"".join(pieces))
    assert [one["text"] for one in shown["choices"]] == ["x" * 50_000 + "b"] * 16 + ["y" * 50_000 + "b"] * 16
    assert len({id(piece) for piece in pieces if len(piece) >= 50_000}) == 2


def test_prompt_only_work_needs_no_decode_worker():
    made = completion(max_tokens=0, stop_token_ids=[3], temperature=0.7, stop="x", guided_regex=None)
    assert made.prompt_only and made.stop == ()
    assert made.sampling.ignore_eos and not made.sampling.stop_token_ids
    assert ends_with_first_token(common_pb2.GenerateSpec(sampling=made.sampling))
    assert not completion(max_tokens=1).prompt_only


@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        ({"max_tokens": 0, "echo": False}, InvalidRequestError, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, InvalidRequestError, "min_tokens"),
        ({"max_tokens": 497, "logprobs": 0}, ContextLengthError, "max_tokens"),
        ({"max_tokens": 7, "prompt_logprobs": 0, "echo": False, "n": 100}, InvalidRequestError, "max_tokens"),
        ({"max_tokens": 1, "prompt_logprobs": 1, "stream": True}, InvalidRequestError, "prompt_logprobs"),
        ({"max_tokens": 0, "logprobs": 20, "n": 100}, InvalidRequestError, "max_tokens"),
        ({"max_tokens": 7, "n": 100}, InvalidRequestError, "max_tokens"),
    ],
)
def test_combinations_without_a_meaning_are_refused_by_field(body, error, field):
    with pytest.raises(error) as raised:
        completion(**body)
    assert raised.value.field == field


def test_no_alternatives_in_a_stream_are_left_out():
    """As in vLLM."""
    made = completion(max_tokens=2, prompt_logprobs=0, stream=True, echo=False)
    assert not made.sampling.prompt_logprobs and made.sampling.max_tokens == 2


def test_an_echoed_prompt_counts_among_the_answers_entries():
    assert completion(max_tokens=6, n=100).n == 100


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echoed_prompt_has_its_log_probabilities(client, max_tokens):
    """As lm-eval asks and reads them."""
    prompts = [[40, 41, 42], [43] * 600]  # the second is longer than a window
    answer = client.completions.create(
        model=NAME, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        count = len(prompt)
        assert found.token_logprobs[:count] == [None, *(-float(p) for p in range(1, count))]
        assert found.top_logprobs[0] is None
        for token, logprob, top in list(
            zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
        )[1:count]:
            assert top[token] == logprob and max(top.values()) == -0.5 and len(top) == 2
        assert len(found.tokens) == len(found.text_offset) == count + max_tokens
        assert found.text_offset[0] == 0
    assert answer.usage.completion_tokens == 2 * max_tokens


async def test_offsets_count_the_special_tokens_that_a_prompt_of_ids_shows():
    """They counted as nothing, so that all places behind them were wrong."""
    text = ModelText(DEMO)
    async with (
        served(StubGateway(text, {})) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        body = {"prompt": [1], "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        for choice in answer["choices"]:
            assert choice["text"] == "<|bos|>x" and choice["logprobs"]["tokens"][0] == "<|bos|>"
            assert choice["logprobs"]["text_offset"] == [0, 7]
        streamed = (await client.post("/v1/completions", json={**body, "stream": True})).text
        assert streamed.count('"text_offset":[7]') == 2
    text.close()


@pytest.mark.parametrize("max_tokens", [1, 300])
def test_a_stream_brings_them_once(router, max_tokens):
    """Before the answer, which a decode worker sends from the second token on, and more than a window of it."""
    body = {"prompt": "abc" * 100, "max_tokens": max_tokens, "echo": True, "logprobs": 0, "n": 2}
    chunks = [
        one["choices"][0] for one in events_of(f"{router.http}/v1/completions", {**body, "stream": True})
    ]
    whole = httpx.post(f"{router.http}/v1/completions", json=body).json()
    for index, choice in enumerate(whole["choices"]):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][name]] == values


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_prompt_logprobs_have_vllms_shape(router, max_tokens):
    body = {"max_tokens": max_tokens, "prompt_logprobs": 1}
    done = httpx.post(f"{router.http}/v1/completions", json={**body, "prompt": [40, 41]}).json()
    (choice,) = done["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    assert {name: (one["logprob"], one["rank"]) for name, one in second.items()} == {
        "300": (-0.5, 1),
        "41": (-1.0, 9),
    }
    assert all(isinstance(one["decoded_token"], str) for one in second.values())
    chat = {**body, "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{router.http}/v1/chat/completions", json=chat).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["logprobs"] is None
    document = httpx.get(f"{router.http}/openapi.json").json()
    for name, value in (("Completion", done), ("ChatCompletion", answer)):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)
