"""The router's gRPC service over a made-up model.

The token at a position depends on the seed and the position only, so every stream can be checked word for
word, and a resumed one against an undisturbed one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc

from cluster.errors import BatonError
from cluster.rpc.errors import ERROR_KEY
from wire import common_pb2, inference_pb2_grpc
from wire import inference_pb2 as pb

VOCABULARY = 1000


def token_at(seed: int, choice: int, position: int) -> int:
    return (seed * 7919 + choice * 104_729 + position * 31) % VOCABULARY


def text_of(token_id: int) -> str:
    return f" {token_id}"


class StubInference(inference_pb2_grpc.InferenceServicer):
    """Answers at once unless set otherwise."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.embedded: list[pb.EmbedRequest] = []
        self.peers: set[str] = set()  # connections of generations
        self.error: BatonError | None = None  # answer every request with it
        self.hang_after: int | None = None  # tokens after which a stream stands still until cancelled
        self.skip_position_at: int | None = None  # a faulty router: leaves one token out
        self.end_early_at: int | None = None  # ends the stream, without an error, after so many tokens
        self.end_in_prompt_at: int | None = None  # the same once, behind so many tokens of a prompt
        self.token_seconds = 0.0
        self.names_workers = True  # as to an admin's key
        self.cancelled = threading.Event()
        self.hanging = threading.Event()
        self.default_seed = 42

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.peers.add(context.peer())
        context.add_callback(self.cancelled.set)
        self._refuse(context)
        prompt_tokens = prompt_length(request)
        seed = request.options.seed if request.options.HasField("seed") else self.default_seed
        request_id = request.request_id or f"stub-{len(self.requests)}"
        yield pb.GenerateResponse(
            started=pb.Started(request_id=request_id, model="stub", seed=seed, prompt_tokens=prompt_tokens)
        )
        if request.options.HasField("prompt_logprobs") and not request.resume_tokens.ids:
            yield from self._prompt(request, prompt_tokens)
            if self.end_in_prompt_at is not None:
                self.end_in_prompt_at = None
                return
        max_tokens = request.options.max_tokens or 8
        for index in range(len(request.resume_tokens.ids), max_tokens):
            if not self._go_on(index, context):
                return
            for choice in range(request.options.n or 1):
                yield self._chunk(request, seed, choice, prompt_tokens, index, index + 1 == max_tokens)
        farewell = completed(prompt_tokens, max_tokens * (request.options.n or 1))
        if not self.names_workers:
            farewell.timings.prefill_worker = farewell.timings.decode_worker = ""
        yield pb.GenerateResponse(completed=farewell)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        self._refuse(context)
        text = request.text or " ".join(turn.content for turn in request.chat.messages)
        return pb.TokenizeResponse(token_ids=[len(word) for word in text.split()])

    def Embed(self, request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        self.embedded.append(request)
        self._refuse(context)
        lengths = [len(one.text) or len(one.token_ids.ids) for one in request.input]
        return pb.EmbedResponse(
            request_id=request.request_id or "stub",
            model="stub",
            embeddings=[pb.Embedding(values=[length, 0.5]) for length in lengths],
            usage=pb.Usage(prompt_tokens=sum(lengths), cached_tokens=1),
            timings=pb.Timings(prefill_seconds=0.25),
        )

    def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(id="stub", max_model_len=4096, created_unix_seconds=7)])

    def _refuse(self, context: grpc.ServicerContext) -> None:
        if self.error is not None:
            context.set_trailing_metadata(((ERROR_KEY, self.error.to_wire().SerializeToString()),))
            context.abort(self.error.grpc_status, self.error.message)

    def _go_on(self, index: int, context: grpc.ServicerContext) -> bool:
        if index == self.end_early_at:
            return False
        if index == self.hang_after:
            self.hanging.set()
            while context.is_active():
                time.sleep(0.005)
            return False
        if self.token_seconds:
            time.sleep(self.token_seconds)
        return True

    def _prompt(self, request: pb.GenerateRequest, count: int) -> Iterator[pb.GenerateResponse]:
        for position in range(1, self.end_in_prompt_at or count):
            top = [common_pb2.TokenLogprob(token_id=i) for i in range(request.options.prompt_logprobs)]
            token = common_pb2.Token(position=position, logprob=-position, rank=2, top_logprobs=top)
            yield pb.GenerateResponse(chunk=pb.Chunk(prompt_tokens=[token]))

    def _chunk(
        self, request: pb.GenerateRequest, seed: int, choice: int, prompt_tokens: int, index: int, last: bool
    ) -> pb.GenerateResponse:
        position = prompt_tokens + index + (1 if index == self.skip_position_at else 0)
        token_id = token_at(seed, choice, position)
        token = common_pb2.Token(choice=choice, position=position, token_id=token_id)
        if request.options.HasField("logprobs"):
            token.logprob = -0.5
            for rank in range(request.options.logprobs):
                token.top_logprobs.add(token_id=rank, logprob=-1.0 - rank)
        reason = "length" if last else ""
        chunk = pb.Chunk(choice=choice, text=text_of(token_id), tokens=[token], finish_reason=reason)
        return pb.GenerateResponse(chunk=chunk)


def completed(prompt_tokens: int, completion_tokens: int) -> pb.Completed:
    usage = pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=2)
    timings = pb.Timings(
        placement_seconds=0.001,
        prefill_seconds=0.01,
        decode_seconds=0.02,
        total_seconds=0.04,
        kv_bytes_shipped=4096,
        transport="nixl",
        prefill_worker="p-1",
        decode_worker="d-1",
        attempts=1,
        placement_calls=1,
    )
    return pb.Completed(usage=usage, timings=timings)


def prompt_length(request: pb.GenerateRequest) -> int:
    if request.WhichOneof("prompt") == "token_ids":
        return len(request.token_ids.ids)
    if request.WhichOneof("prompt") == "chat":
        return sum(len(turn.content.split()) for turn in request.chat.messages)
    return len(request.text.split())


class StubRouter:
    """A StubInference behind a real server on a port of its own. `stop` drops every stream at once."""

    def __init__(self) -> None:
        self.inference = StubInference()
        self._threads = futures.ThreadPoolExecutor(max_workers=16)
        self._server = grpc.server(self._threads)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.inference, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(5)
        self._threads.shutdown(wait=True)
