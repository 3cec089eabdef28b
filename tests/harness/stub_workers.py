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
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from cluster.config.worker import Role
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.protocol.wire_version import WIRE_VERSION
from wire import common_pb2, decode_pb2, prefill_pb2

MODEL_ID = "bench-stub"
TOKEN_ID = 300
MAX_ATTEMPTS = 4096
WAIT_SECONDS = 30.0
KV_BYTES_PER_TOKEN = 32768

Event = common_pb2.AttemptEvent


class StubWorkers:
    """Both roles. A prefill Run leaves its spec where the decode Attach of the same attempt finds it."""

    def __init__(self) -> None:
        self._specs: dict[bytes, asyncio.Future[common_pb2.GenerateSpec]] = {}

    async def run(self, request: prefill_pb2.PrefillRunRequest, context: Any) -> AsyncIterator[Event]:
        """Prefill.Run: the first token, then the report."""
        self._spec(request.transfer_id).set_result(request.spec)
        for event in token_events(request.spec, 1):
            yield event
        prompt = len(request.spec.prompt_tokens) // 4
        yield end_event(
            common_pb2.WorkReport(
                computed_prompt_tokens=prompt,
                kv_bytes_shipped=prompt * KV_BYTES_PER_TOKEN,
                transport="stub",
                worker_id="stub-prefill",
            )
        )

    async def attach(self, request: decode_pb2.AttachRequest, context: Any) -> AsyncIterator[Event]:
        """Decode.Attach: every token, then the report."""
        spec = await asyncio.wait_for(self._spec(request.transfer_id), WAIT_SECONDS)
        del self._specs[request.transfer_id]
        for event in token_events(spec, spec.sampling.max_tokens):
            yield event
        yield end_event(common_pb2.WorkReport(worker_id="stub-decode"))

    async def run_locally(self, request: decode_pb2.DecodeRunRequest, context: Any) -> AsyncIterator[Event]:
        """Decode.Run: prefill and decode in one place."""
        for event in token_events(request.spec, request.spec.sampling.max_tokens):
            yield event
        yield end_event(common_pb2.WorkReport(worker_id="stub-decode"))

    def _spec(self, transfer_id: bytes) -> asyncio.Future[common_pb2.GenerateSpec]:
        if transfer_id not in self._specs:
            while len(self._specs) >= MAX_ATTEMPTS:  # attempts of which one half never came
                self._specs.pop(next(iter(self._specs))).cancel()
            self._specs[transfer_id] = asyncio.get_running_loop().create_future()
        return self._specs[transfer_id]


def token_events(spec: common_pb2.GenerateSpec, count: int) -> list[Event]:
    """The next `count` tokens after those that earlier attempts, or another router, have sent."""
    begin, held = len(spec.prompt_tokens) // 4, len(spec.output_tokens) // 4
    alternatives = [
        common_pb2.TokenLogprob(token_id=TOKEN_ID + i, logprob=-1.0)
        for i in range(spec.sampling.top_logprobs)
    ]
    events = []
    for index in range(held, min(held + count, spec.sampling.max_tokens)):
        last = index + 1 == spec.sampling.max_tokens
        finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
        for choice in range(spec.first_choice, spec.first_choice + max(1, spec.n)):
            token = common_pb2.Token(
                choice=choice,
                position=begin + index,
                token_id=TOKEN_ID,
                finish=finish,
                top_logprobs=alternatives,
            )
            events.append(Event(token=token))
    return events


def end_event(report: common_pb2.WorkReport) -> Event:
    return Event(end=common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE, report=report))


def services(workers: StubWorkers) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    prefill = {
        "Run": _stream(workers.run, prefill_pb2.PrefillRunRequest.FromString),
        "Cancel": _unary(prefill_pb2.PrefillCancelRequest.FromString, prefill_pb2.PrefillCancelResponse()),
    }
    decode = {
        "Attach": _stream(workers.attach, decode_pb2.AttachRequest.FromString),
        "Run": _stream(workers.run_locally, decode_pb2.DecodeRunRequest.FromString),
        "Cancel": _unary(decode_pb2.DecodeCancelRequest.FromString, decode_pb2.DecodeCancelResponse()),
    }
    return (
        grpc.method_handlers_generic_handler("baton.v1.Prefill", prefill),
        grpc.method_handlers_generic_handler("baton.v1.Decode", decode),
    )


def _stream(handler: Any, parse: Callable[[bytes], Any]) -> Any:
    return grpc.unary_stream_rpc_method_handler(
        handler, request_deserializer=parse, response_serializer=Event.SerializeToString
    )


def _unary(parse: Callable[[bytes], Any], answer: Any) -> Any:
    async def handler(request: Any, context: Any) -> Any:
        return answer

    return grpc.unary_unary_rpc_method_handler(
        handler, request_deserializer=parse, response_serializer=type(answer).SerializeToString
    )


def register(redis_url: str, namespace: str, role: Role, number: int, address: str) -> Registration:
    layout = common_pb2.KvLayout(
        wire_version=WIRE_VERSION,
        model_id=MODEL_ID,
        dtype="bfloat16",
        page_size=16,
        num_layers=16,
        num_kv_heads=8,
        head_dim=64,
        tensor_parallel=1,
    )
    info = WorkerInfo(
        worker_id=f"stub-{role}-{number}",
        epoch=secrets.randbits(64) or 1,
        slot=0,
        role=role,
        model_id=MODEL_ID,
        address=address,
        metrics_address="",
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
    redis_url: str, namespace: str, pairs: int, make: Callable[[], StubWorkers] = StubWorkers
) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(services(make()))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    roles: tuple[Role, Role] = ("prefill", "decode")
    registered = [register(redis_url, namespace, role, n, address) for role in roles for n in range(pairs)]
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for registration in registered:
        await asyncio.to_thread(registration.stop)
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, default=4, help="workers of each role")
    given = parser.parse_args()
    asyncio.run(serve(given.redis_url, given.namespace, given.pairs))
