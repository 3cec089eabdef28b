"""Both doors as clients use them: the openai package unmodified, plain grpcio, reflection; and what they refuse."""

from __future__ import annotations

import asyncio
import json
import socket

import grpc
import httpx
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import Client
from cluster.errors import ContextLengthError, InvalidRequestError, UnknownModelError
from tests.checkpoints import CONTEXT, VOCAB
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.test_handover import PROCESS
from wire import inference_pb2, inference_pb2_grpc

NAME = "tiny"


@pytest.fixture(scope="module")
def cluster(checkpoint, tmp_path_factory):
    flags = (*PROCESS, "--served-model-name", NAME)
    with run_cluster(tmp_path_factory.mktemp("doors"), checkpoint("llama"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture
def http(cluster):
    with httpx.Client(base_url=cluster.http, timeout=60) as made:
        yield made


def test_chat_whole_and_streamed_say_the_same(client):
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


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(one.top_logprobs) == 2 for one in content)


def test_a_stop_string_ends_the_answer_before_itself(client):
    free = client.completions.create(model=NAME, prompt="abc", max_tokens=24, temperature=0).choices[0].text
    stop = free[4:6]
    cut = client.completions.create(
        model=NAME, prompt="abc", max_tokens=24, temperature=0, stop=[stop]
    ).choices[0]
    assert cut.text == free.split(stop)[0]
    assert cut.finish_reason == "stop"


def test_vllms_extra_fields(client):
    extra = {
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = client.completions.create(model=NAME, prompt="abc", max_tokens=5, seed=3, extra_body=extra)
    assert len(answer.choices[0].model_extra["token_ids"]) == 5


def test_the_async_client(cluster):
    async def talk() -> str:
        async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="-") as made:
            stream = await made.completions.create(
                model=NAME, prompt="abc", max_tokens=5, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    assert asyncio.run(talk())


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


BAD: list[tuple[str, dict, str]] = [
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": "abc", "max_tokens": CONTEXT}, "max_tokens"),
    ("completions", {"prompt": "abc", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": [VOCAB]}, "prompt"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": "abc", "temperature": -0.1}, "temperature"),
    ("completions", {"prompt": "abc", "temperature": "hot"}, "temperature"),
    ("completions", {"prompt": "abc", "top_p": 1.5}, "top_p"),
    ("completions", {"prompt": "abc", "n": 0}, "n"),
    ("completions", {"prompt": "abc", "n": 1000}, "n"),
    ("completions", {"prompt": "abc", "stop": 5}, "stop"),
    ("completions", {"prompt": "abc", "stop": [""]}, "stop"),
    ("completions", {"prompt": "abc", "logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {"prompt": "abc", "logprobs": 500}, "logprobs"),
    ("completions", {"prompt": "abc", "echo": True}, "echo"),
    ("completions", {"prompt": "abc", "no_such_field": 1}, "no_such_field"),
    ("completions", {"prompt": "abc", "model": "another"}, "model"),
    ("completions", {"prompt": "abc", "stream": "yes"}, "stream"),
    ("completions", {"prompt": "abc", "stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        "tools",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
        "response_format",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD)
def test_bad_input_is_400_and_names_the_field(path, body, field, http):
    answer = http.post(f"/v1/{path}", json={"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\xff"}', b"null", b'{"temperature": NaN}']
)
def test_malformed_json_is_400(raw, http):
    answer = http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_deep_nesting_is_400(http):
    nested = b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}"
    assert http.post("/v1/completions", content=nested).status_code == 400


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
    assert 'baton_requests_total{outcome="ok"}' in metrics
    assert "baton_time_to_first_token_seconds_count" in metrics


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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "another"}, UnknownModelError),
        ({"temperature": -1.0}, InvalidRequestError),
        ({"temperature": float("nan")}, InvalidRequestError),
        ({"max_tokens": CONTEXT}, ContextLengthError),
        ({"top_p": 2.0}, InvalidRequestError),
    ],
)
def test_bad_grpc_input_has_a_typed_error(options, error, cluster):
    with Client(cluster.grpc) as client, pytest.raises(error):
        client.generate("abc", **options)
    with Client(cluster.grpc) as client, pytest.raises(InvalidRequestError):
        client.generate([VOCAB + 5])


def test_malformed_protobuf_is_an_invalid_argument(cluster):
    with grpc.insecure_channel(cluster.grpc) as channel:
        call = channel.unary_stream("/baton.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\xff\xff\xff", timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_oversized_grpc_message_is_resource_exhausted(cluster):
    with grpc.insecure_channel(cluster.grpc) as channel:
        call = channel.unary_stream("/baton.v1.Inference/Generate")
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
    from tests.end_to_end.test_handover import assert_all_free

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
