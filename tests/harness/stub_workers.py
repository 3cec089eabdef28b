"""Workers that answer at once, so that a request's time is the router's.

One process that registers as prefill and decode workers of the cluster and serves both services from made-up
tokens. `python -m tests.harness.stub_workers --redis-url … --namespace …` prints its address
and ends with its stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import grpc
import numpy as np

from cluster.config.worker import Role
from cluster.errors import BatonError
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import unpack_tokens
from cluster.protocol.prompt_scores import leave_out_prompt_logprobs
from cluster.protocol.wire_version import WIRE_VERSION
from router.link.token import PlainToken, Token
from tests.harness.linked_worker import LinkedWorker
from wire import common_pb2, decode_pb2, prefill_pb2
from worker.attempt_log import AttemptLog

MODEL_ID = "bench-stub"
TOKEN_ID = 300
KV_BYTES_PER_TOKEN = 32768


class StubWorkers:
    """Both roles of all workers of this process. An attempt's tokens are made when its Run is taken in."""

    def __init__(self, dimensions: int = 0) -> None:
        """`dimensions`: of the vectors that it makes."""
        self.dimensions = dimensions
        self.workers: dict[int, LinkedWorker] = {}  # by epoch
        self._running: dict[bytes, asyncio.Task[None]] = {}

    def add(self, worker_id: str, epoch: int) -> LinkedWorker:
        worker = self.workers[epoch] = LinkedWorker(worker_id, epoch, self._cancelled)
        return worker

    # --- what a kind of stub worker does differently -----------------------------------------------------

    async def prefill(self, request: prefill_pb2.PrefillRunRequest) -> common_pb2.WorkReport:
        """Before the first token. Raises BatonError."""
        prompt = len(request.spec.prompt_tokens) // 4
        return common_pb2.WorkReport(
            computed_prompt_tokens=prompt,
            kv_bytes_shipped=prompt * KV_BYTES_PER_TOKEN,
            transport="stub",
            worker_id="stub-prefill",
        )

    async def decode(self, spec: common_pb2.GenerateSpec, log: AttemptLog) -> common_pb2.WorkReport:
        """Every token."""
        for token in tokens_of(spec, spec.sampling.max_tokens):
            add(log, token)
        return common_pb2.WorkReport(worker_id="stub-decode")

    # --- calls of routers ----------------------------------------------------------------------------------

    async def run(
        self, request: prefill_pb2.PrefillRunRequest, context: Any
    ) -> prefill_pb2.PrefillRunResponse:
        worker = self.workers[request.worker_epoch]
        log = worker.open(request.transfer_id, request.handle, request.spec)
        decoding = None
        if request.HasField("decode_handle"):
            other, reserved = self.workers[request.decode.epoch], common_pb2.GenerateSpec()
            reserved.CopyFrom(request.spec)
            leave_out_prompt_logprobs(reserved)
            decoding = other.open(request.transfer_id, request.decode_handle, reserved)
        self._start(request.transfer_id, self._run(request, log, decoding))
        return prefill_pb2.PrefillRunResponse()

    async def _run(
        self, request: prefill_pb2.PrefillRunRequest, log: AttemptLog, decoding: AttemptLog | None
    ) -> None:
        try:
            report = await self.prefill(request)
        except BatonError as error:
            log.end(common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_ABORTED, error=error.to_wire()))
            return
        if request.spec.sampling.pooling:
            add(log, vector_of(request.spec, self.dimensions))
        for token in (*prompt_of(request.spec), *tokens_of(request.spec, 1)):
            add(log, token)
        log.end(done(report))
        if decoding is not None:
            decoding.end(done(await self.decode(request.spec, decoding)))

    async def run_locally(
        self, request: decode_pb2.DecodeRunRequest, context: Any
    ) -> decode_pb2.DecodeRunResponse:
        worker = self.workers[request.worker_epoch]
        log = worker.open(request.transfer_id, request.handle, request.spec)
        self._start(request.transfer_id, self._run_locally(request.spec, log))
        return decode_pb2.DecodeRunResponse()

    async def _run_locally(self, spec: common_pb2.GenerateSpec, log: AttemptLog) -> None:
        for token in prompt_of(spec):
            add(log, token)
        log.end(done(await self.decode(spec, log)))

    def _start(self, transfer_id: bytes, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._running[transfer_id] = task
        task.add_done_callback(lambda _: self._running.pop(transfer_id, None))

    def _cancelled(self, transfer_id: bytes) -> None:
        task = self._running.get(transfer_id)
        if task is not None:
            task.cancel()


def tokens_of(spec: common_pb2.GenerateSpec, count: int) -> Iterator[Token]:
    """The next `count` tokens after those that earlier attempts, or another router, have sent."""
    begin, held = len(spec.prompt_tokens) // 4, len(spec.output_tokens) // 4
    alternatives = [
        common_pb2.TokenLogprob(token_id=TOKEN_ID + i, logprob=-1.0)
        for i in range(spec.sampling.top_logprobs)
    ]
    for index in range(held, min(held + count, spec.sampling.max_tokens)):
        last = index + 1 == spec.sampling.max_tokens
        finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
        for choice in range(spec.first_choice, spec.first_choice + max(1, spec.n)):
            if not last and not alternatives:
                yield PlainToken(choice, begin + index, TOKEN_ID)
                continue
            yield common_pb2.Token(
                choice=choice,
                position=begin + index,
                token_id=TOKEN_ID,
                finish=finish,
                top_logprobs=alternatives,
            )


def prompt_of(spec: common_pb2.GenerateSpec) -> Iterator[common_pb2.Token]:
    """The prompt's tokens, if their log probabilities are wanted: that of position p is -p."""
    prompt = unpack_tokens(spec.prompt_tokens) if spec.sampling.prompt_logprobs else []
    top = [
        common_pb2.TokenLogprob(token_id=TOKEN_ID + i, logprob=-0.5)
        for i in range(spec.sampling.prompt_top_logprobs)
    ]
    for position, token_id in enumerate(prompt[1:], 1):
        yield common_pb2.Token(
            choice=spec.first_choice + max(1, spec.n),
            position=position,
            token_id=token_id,
            logprob=-position,
            top_logprobs=top,
            rank=9,
        )


def vector_of(spec: common_pb2.GenerateSpec, dimensions: int) -> common_pb2.Token:
    """The prompt's embedding: 1, 2, …"""
    values = np.arange(1, dimensions + 1, dtype="<f4").tobytes()
    return common_pb2.Token(choice=spec.first_choice + 1, position=1, token_id=TOKEN_ID, embedding=values)


def add(log: AttemptLog, token: Token) -> None:
    if isinstance(token, PlainToken):
        log.add(token.choice, token.position, token.token_id)
        return
    whole = token.finish or token.top_logprobs or token.rank or token.embedding
    log.add(token.choice, token.position, token.token_id, token if whole else None)


def done(report: common_pb2.WorkReport) -> common_pb2.AttemptEnd:
    return common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE, report=report)


def services(workers: StubWorkers) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    async def cancel_prefill(request: Any, context: Any) -> prefill_pb2.PrefillCancelResponse:
        return prefill_pb2.PrefillCancelResponse()

    async def cancel_decode(request: Any, context: Any) -> decode_pb2.DecodeCancelResponse:
        return decode_pb2.DecodeCancelResponse()

    prefill = {
        "Run": _unary(workers.run, prefill_pb2.PrefillRunRequest),
        "Cancel": _unary(cancel_prefill, prefill_pb2.PrefillCancelRequest),
    }
    decode = {
        "Run": _unary(workers.run_locally, decode_pb2.DecodeRunRequest),
        "Cancel": _unary(cancel_decode, decode_pb2.DecodeCancelRequest),
    }
    return (
        grpc.method_handlers_generic_handler("baton.v1.Prefill", prefill),
        grpc.method_handlers_generic_handler("baton.v1.Decode", decode),
    )


def _unary(handler: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        handler,
        request_deserializer=request.FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )


def register(
    redis_url: str, namespace: str, role: Role, worker: LinkedWorker, address: str, model: str = ""
) -> Registration:
    """`model`: the name that it registers; "" = none."""
    model_id = f"{MODEL_ID}-{model}" if model else MODEL_ID
    layout = common_pb2.KvLayout(
        wire_version=WIRE_VERSION,
        model_id=model_id,
        dtype="bfloat16",
        page_size=16,
        num_layers=16,
        num_kv_heads=8,
        head_dim=64,
        tensor_parallel=1,
    )
    info = WorkerInfo(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        slot=0,
        role=role,
        model_id=model_id,
        served_model=model,
        address=address,
        metrics_address="",
        link_address=worker.address,
        layout=layout.SerializeToString(),
        place="",
        host=socket.gethostname(),
        max_model_len=4096,
        blocks_total=65536,
    )
    registration = Registration(redis_url, namespace, info)
    registration.start()
    return registration


async def serve(
    redis_url: str,
    namespace: str,
    pairs: int,
    make: Callable[[], StubWorkers] = StubWorkers,
    models: Sequence[str] = ("",),
) -> None:
    """`models`: names that workers register, `pairs` of each role for each; "" = none."""
    stubs = make()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(services(stubs))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    roles: tuple[Role, Role] = ("prefill", "decode")
    registered = []
    for role, (number, model) in product(roles, enumerate(model for model in models for _ in range(pairs))):
        worker = stubs.add(f"stub-{role}-{number}", secrets.randbits(64) or 1)
        await worker.start()
        registered.append(register(redis_url, namespace, role, worker, address, model))
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for registration in registered:
        await asyncio.to_thread(registration.stop)
    for worker in stubs.workers.values():
        await worker.stop()
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, default=4, help="workers of each role")
    parser.add_argument("--dimensions", type=int, default=0, help="of embeddings")
    given = parser.parse_args()
    made = partial(StubWorkers, given.dimensions)
    asyncio.run(serve(given.redis_url, given.namespace, given.pairs, made))
