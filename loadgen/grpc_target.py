"""Sends requests to Baton's own gRPC service."""

from __future__ import annotations

from typing import Any

import grpc

from loadgen.config import LoadConfig
from loadgen.reach import goes_by_proxy
from loadgen.record import QUEUES, STAGES, RequestRecord
from loadgen.target import Clock, RequestFailed
from loadgen.workload import ChatPrompt, Prompt, TextPrompt
from wire import common_pb2, inference_pb2_grpc
from wire import inference_pb2 as pb

_ERROR_KEY = "baton-error-bin"
# A connection of its own for each target. By default all of a process's channels to an address share one: loads of several
# tenants would share its streams, and one's calls beyond these would have the other's refused (REFUSED_STREAM).
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class GrpcTarget:
    def __init__(self, config: LoadConfig, address: str, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._channel = _channel(config, address.removeprefix("grpc://"))
        self._metadata = (("authorization", f"Bearer {config.api_key}"),) if config.api_key else ()
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)

    async def send(self, prompt: Prompt, record: RequestRecord) -> str:
        request = self._request(prompt)
        record.sent = self._clock()
        call = self._stub.Generate(request, timeout=self._config.timeout_seconds, metadata=self._metadata)
        try:
            return await self._read(call, record)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            call.cancel()  # no effect on a call that has ended

    async def _read(self, call: Any, record: RequestRecord) -> str:
        text: list[str] = []
        completed = False
        async for event in call:
            if event.HasField("started"):
                record.prompt_tokens = event.started.prompt_tokens
            kind = event.WhichOneof("event")
            if kind == "chunk":
                if event.chunk.tokens or event.chunk.text:
                    record.arrived(self._clock(), max(1, len(event.chunk.tokens)))
                text.append(event.chunk.text)
            elif kind == "completed":
                completed = True
                _note_completed(event.completed, record)
        if not completed:
            raise RequestFailed("cut_off", "the stream ended without its last event")
        return "".join(text)

    def _request(self, prompt: Prompt) -> pb.GenerateRequest:
        config = self._config
        request = pb.GenerateRequest(model=config.model)
        request.options.max_tokens = config.max_tokens
        request.options.temperature = config.temperature
        request.options.ignore_eos = config.ignore_eos
        if isinstance(prompt, TextPrompt):
            request.text = prompt.text
        elif isinstance(prompt, ChatPrompt):
            turns = [pb.ChatMessage(role=role, content=content) for role, content in prompt.messages]
            request.chat.messages.extend(turns)
        else:
            request.token_ids.ids.extend(prompt.ids)
        return request

    async def close(self) -> None:
        await self._channel.close(None)


def _note_completed(completed: pb.Completed, record: RequestRecord) -> None:
    record.prompt_tokens = completed.usage.prompt_tokens
    record.usage_tokens = completed.usage.completion_tokens
    record.cached_tokens = completed.usage.cached_tokens
    record.timings = timings = completed.timings
    shows_all = bool(timings.decode_worker)  # else the router has omitted workers and queueing times
    record.stages = {stage: getattr(timings, stage) for stage in STAGES if shows_all or stage not in QUEUES}


def _channel(config: LoadConfig, address: str) -> grpc.aio.Channel:
    options = [*_OPTIONS, ("grpc.enable_http_proxy", int(goes_by_proxy(address)))]
    if not config.has_tls:
        return grpc.aio.insecure_channel(address, options)
    ca, key, cert = (
        file.read_bytes() if file is not None else None
        for file in (config.tls_ca, config.tls_key, config.tls_cert)
    )
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)


def _failure(error: grpc.aio.AioRpcError) -> RequestFailed:
    """The failure, named by the server's error if the answer has one, else by the status."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _ERROR_KEY:
            detail = common_pb2.ErrorDetail.FromString(value)
            return RequestFailed(detail.code, detail.message)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestFailed("deadline", "no end within the request's deadline")
    return RequestFailed(f"grpc_{error.code().name.lower()}", error.details() or "")
