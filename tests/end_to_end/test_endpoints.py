"""HTTP and gRPC as clients use them: the openai package unmodified, plain grpcio, reflection; and their refusals."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from typing import Any, Literal

import grpc
import httpx
import openai
import pydantic
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import Client
from cluster.errors import InvalidRequestError
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.end_to_end.openai_answers import ids_of, whole_of
from tests.end_to_end.refused_requests import BAD, BAD_OPTIONS, FLOATS
from tests.harness.model_text import VOCAB
from tests.harness.waiting import wait_for
from wire import inference_pb2, inference_pb2_grpc

NAME = "tiny"


@pytest.fixture(scope="module")
def cluster(checkpoint, tmp_path_factory):
    flags = (*PROCESS, "--served-model-name", NAME)
    with run_cluster(tmp_path_factory.mktemp("endpoints"), checkpoint("llama"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture
def http(cluster):
    with httpx.Client(base_url=cluster.http, timeout=60) as made:
        yield made


def test_chat_whole_and_streamed_are_equal(client):
    ask = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 12}
    whole = client.chat.completions.create(**ask, temperature=0)
    streamed = list(
        client.chat.completions.create(
            **ask, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content
    assert streamed[0].choices[0].delta.role == "assistant"
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens_details.cached_tokens is not None


def test_completions_with_choices_logprobs_and_token_prompts(client):
    answer = client.completions.create(
        model=NAME, prompt=[5, 6, 7, 8], max_tokens=6, n=2, temperature=0, logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    first = answer.choices[0]
    assert len(first.logprobs.tokens) == 6
    assert all(len(top) <= 3 for top in first.logprobs.top_logprobs)
    assert first.logprobs.token_logprobs[0] == max(first.logprobs.top_logprobs[0].values())
    several = client.completions.create(model=NAME, prompt=["ab", "cd"], max_tokens=2, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1]


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]
    tame: bool


def test_a_conversation_with_calls_and_their_results_is_answered(client):
    function = {"name": "f", "arguments": '{"x": "<|im_end|>"}'}
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}]},
    ]
    ask = {"model": NAME, "messages": messages, "max_tokens": 3}
    more = {"chat_template_kwargs": {"enable_thinking": False}}
    assert client.chat.completions.create(**ask, extra_body=more).usage.completion_tokens == 3
    answer = client.chat.completions.create(
        **ask, tool_choice="none", tools=[{"type": "function", "function": {"name": "f"}}]
    )
    assert answer.choices[0].finish_reason == "length"


def test_answers_in_a_response_format_parse(client):
    """Whole, and through the client's own helper for pydantic models."""
    ask = {"model": NAME, "messages": [{"role": "user", "content": "a pet"}], "max_completion_tokens": 90}
    parsed = client.chat.completions.parse(**ask, response_format=Pet)
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Pet)
    digits = client.completions.create(
        model=NAME, prompt="x", n=2, max_tokens=9, extra_body={"guided_regex": "[0-9]{4}"}
    )
    assert all(len(one.text) == 4 and one.text.isdigit() for one in digits.choices)
    assert client.models.list().data[0].model_extra["structured_output"] is True


def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(client):
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "tags", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=r"at /properties/tags/uniqueItems: .*uniqueItems"):
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "x"}], response_format=wanted
        )


def test_a_stop_string_ends_the_answer_before_itself(client):
    free = client.completions.create(model=NAME, prompt="abc", max_tokens=24, temperature=0).choices[0].text
    stop = free[4:6]
    cut = client.completions.create(
        model=NAME, prompt="abc", max_tokens=24, temperature=0, stop=[stop]
    ).choices[0]
    assert cut.text == free.split(stop)[0]
    assert cut.finish_reason == "stop"


@pytest.fixture
def tokens(client):
    """Tokens and the reason they ended, of a prompt that is too short to be in the prefix cache; greedy."""

    def say(**asked):
        standard = {"max_tokens": 8, "temperature": 0, **asked}
        extra = {"return_token_ids": True, **standard.pop("extra_body", {})}
        answer = client.completions.create(model=NAME, prompt="abc", extra_body=extra, **standard)
        return ids_of(answer.choices[0]), answer.choices[0].finish_reason

    return say


TINY = {"temperature": 1e-38, "top_p": 0.9}


@pytest.mark.parametrize("field", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, TINY])
def test_fields_that_leave_only_the_best_token(field, tokens):
    free = tokens(temperature=20.0, seed=1)
    assert tokens(temperature=20.0, seed=1, extra_body=field) == tokens() != free


def test_penalties_change_the_output(tokens):
    once, _ = tokens(max_tokens=24, extra_body={"repetition_penalty": 100.0})
    often, _ = tokens(max_tokens=24)
    assert len(set(once)) > len(set(often))
    favoured = {"logit_bias": {"7": 100, "8": 99}}
    assert set(tokens(**favoured)[0]) == {7}
    assert set(tokens(**favoured, frequency_penalty=2.0)[0]) == {7, 8}
    assert tokens(**favoured, presence_penalty=2.0)[0][:2] == [7, 8]


def test_end_of_an_answer_and_its_delays(tokens):
    stop = {"stop_token_ids": [7]}
    assert tokens(logit_bias={"7": 100}, extra_body=stop) == ([7], "stop")
    ids, finish = tokens(logit_bias={"7": 100}, extra_body={**stop, "min_tokens": 4})
    assert (len(ids), ids[-1], finish) == (4, 7, "stop") and 7 not in ids[:-1]
    assert tokens(logit_bias={"2": 100}) == ([2], "stop")
    assert tokens(logit_bias={"2": 100}, extra_body={"ignore_eos": True}) == ([2] * 8, "length")


def test_a_seed_repeats_its_answer_and_another_does_not(tokens):
    first, again, other = (tokens(temperature=1.0, seed=seed, max_tokens=24) for seed in (3, 3, 4))
    assert first == again != other


SAMPLED = {"model": NAME, "temperature": 1.0, "seed": 11, "n": 2}


def test_streamed_choices_with_logprobs_and_a_stop_are_the_whole_answers(client):
    ask = {**SAMPLED, "prompt": "abc", "max_tokens": 16, "logprobs": 2}
    free = client.completions.create(**ask).choices
    assert free[0].text != free[1].text
    ask["stop"] = next(one for one in free[0].text[3:] if one.isascii() and one not in free[0].text[:3])
    whole = client.completions.create(**ask).choices
    streamed = whole_of(client.completions.create(**ask, stream=True))
    assert set(streamed) == {0, 1}
    assert whole[0].finish_reason == "stop" and ask["stop"] not in whole[0].text
    for choice in whole:
        parts = streamed[choice.index]
        assert (parts["text"], parts["finish_reason"]) == (choice.text, choice.finish_reason)
        for name in ("tokens", "text_offset"):
            joined = [one for part in parts["logprobs"] for one in getattr(part, name)]
            assert joined == getattr(choice.logprobs, name)


def test_the_async_client_chats_in_several_choices(cluster):
    ask: dict[str, Any] = {**SAMPLED, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    ask |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}

    async def talk():
        async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="-", max_retries=0) as made:
            whole = await made.chat.completions.create(**ask)
            stream = await made.chat.completions.create(**ask, stream=True)
            plain = await made.completions.create(model=NAME, prompt="abc", max_tokens=5, stream=True)
            return whole, whole_of([chunk async for chunk in stream]), [chunk async for chunk in plain]

    whole, streamed, plain = asyncio.run(talk())
    assert whole_of(plain)[0]["text"]
    assert [choice.index for choice in whole.choices] == sorted(streamed) == [0, 1]
    for choice in whole.choices:
        parts = streamed[choice.index]
        assert (parts["text"], parts["finish_reason"]) == (choice.message.content, choice.finish_reason)
        joined = [one for part in parts["logprobs"] for one in part.content]
        assert [one.token for one in joined] == [one.token for one in choice.logprobs.content]
        assert [len(one.top_logprobs) for one in joined] == [2] * 12
        said = b"".join(bytes(one.bytes) for one in joined)
        assert said.decode(errors="replace") == choice.message.content


def test_harmless_fields_pass_and_the_request_id_comes_back(http):
    body = {
        "model": NAME,
        "prompt": "abc",
        "max_tokens": 3,
        "ignore_eos": True,
        "user": "me",
        "metadata": {"a": "b"},
        "tools": [],
    }
    answer = http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["baton"]["transport"] == "nixl"


def test_prompt_only_work_stays_at_the_prefill_worker(http):
    body = {"prompt": "abcdef", "max_tokens": 0, "echo": True}
    answer = http.post("/v1/completions", json=body)
    (choice,), shown = answer.json()["choices"], answer.json()["baton"]
    assert (choice["text"], choice["finish_reason"]) == ("abcdef", "length")
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert shown["transport"] == "" and shown["kv_bytes_shipped"] == 0
    assert shown["prefill_worker"] and shown["prefill_seconds"] > 0
    longer = http.post("/v1/completions", json={**body, "max_tokens": 3, "temperature": 0}).json()
    plain = http.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 3, "temperature": 0}).json()
    assert longer["choices"][0]["text"] == "abcdef" + plain["choices"][0]["text"]


@pytest.fixture
def untouched(cluster):
    """No request of the test is placed on a worker."""

    def calls():  # null while Redis has not answered the router, as on a busy machine
        wait_for(lambda: cluster.view()["placement"]["calls"] is not None, 30.0, "the calls are known")
        placement = cluster.view()["placement"]
        return placement["calls"], placement["calls_here"]

    before = calls()
    yield
    assert calls() == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("path", "body", "field"), BAD)
def test_bad_input_is_400_and_names_the_field(path, body, field, http):
    answer = http.post(f"/v1/{path}", json={"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\xff"}', b"null", b'{"temperature": NaN}']
)
def test_malformed_json_is_400(raw, http):
    answer = http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.usefixtures("untouched")
def test_deep_nesting_is_400(http):
    nested = b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}"
    assert http.post("/v1/completions", content=nested).status_code == 400


@pytest.mark.usefixtures("untouched")
def test_a_body_that_is_too_large_is_413(http):
    answer = http.post("/v1/completions", content=b" " * (9 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_unknown_paths_have_error_bodies_too(http):
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_health_ready_models_and_metrics(http):
    assert http.get("/health").status_code == 200
    assert http.get("/ready").json() == {"ready": True, "why": []}
    assert http.get("/v1/models").json()["data"][0]["id"] == NAME
    assert http.get(f"/v1/models/{NAME}").status_code == 200
    assert http.get("/v1/models/other").status_code == 404
    http.post("/v1/completions", json={"model": NAME, "prompt": "abc", "max_tokens": 3})
    metrics = http.get("/metrics").text
    assert f'baton_requests_total{{model="{NAME}",outcome="ok"}}' in metrics
    assert "baton_time_to_first_token_seconds_count" in metrics
    assert 'baton_placement_cost_seconds_count{term="handoff"}' in metrics


def test_a_plain_grpc_client_and_its_deadline(cluster):
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="abc")
        request.options.max_tokens = 5
        events = list(stub.Generate(request, timeout=60))
        assert [event.HasField("started") for event in events] == [True] + [False] * (len(events) - 1)
        assert sum(len(event.chunk.tokens) for event in events) == 5
        assert events[-1].completed.usage.completion_tokens == 5
        request.options.max_tokens = 900
        request.options.ignore_eos = True
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=0.2))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [*FLOATS, "logit_bias"])
def test_numbers_that_are_none_are_refused_over_grpc(field, value, cluster):
    options: dict[str, Any] = {field: {3: value} if field == "logit_bias" else value}
    with Client(cluster.grpc) as client, pytest.raises(InvalidRequestError) as caught:
        client.generate("abc", **options)
    assert caught.value.field == field


def test_these_are_all_the_floats_there_are():
    options = inference_pb2.GenerateOptions.DESCRIPTOR.fields
    assert {one.name for one in options if one.type == one.TYPE_FLOAT} == set(FLOATS)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("options", "error"), BAD_OPTIONS)
def test_bad_grpc_input_has_a_typed_error(options, error, cluster):
    with Client(cluster.grpc) as client, pytest.raises(error):
        client.generate("abc", **options)
    with Client(cluster.grpc) as client, pytest.raises(InvalidRequestError):
        client.generate([VOCAB + 5])


@pytest.mark.usefixtures("untouched")
def test_malformed_protobuf_is_an_invalid_argument(cluster):
    with grpc.insecure_channel(cluster.grpc) as channel:
        call = channel.unary_stream("/baton.v1.Inference/Generate", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\xff\xff\xff", timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.usefixtures("untouched")
def test_an_oversized_grpc_message_is_resource_exhausted(cluster):
    with grpc.insecure_channel(cluster.grpc) as channel:
        call = channel.unary_stream("/baton.v1.Inference/Generate", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(bytes(9 << 20), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_reflection_lists_the_services(cluster):
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = stub.ServerReflectionInfo(ask, timeout=60)
    names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= names


def test_a_client_that_hangs_up_frees_everything(cluster):
    from tests.end_to_end.handover import assert_all_free

    host, port = cluster.http.removeprefix("http://").split(":")
    body = json.dumps({"model": NAME, "prompt": "abc", "max_tokens": 900, "ignore_eos": True, "stream": True})
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body.encode())
        assert b"200" in sock.recv(4096)
    before = cluster.status("decode")["output_tokens"]
    assert_all_free(cluster)
    # Cancelled, not run to its end.
    assert cluster.status("decode")["output_tokens"] - before < 800
