"""gRPC's reflection, within the limits of requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from cluster.errors import DeadlineError, InvalidRequestError
from router.admission.admission import HeldBytes
from router.frontends.grpc.gate import Context, caller_of
from router.frontends.grpc.message import read_message
from router.frontends.grpc.refusal import generic_handler
from router.frontends.grpc.write_deadline import write_all
from router.gateway import RequestGateway

SERVICE = reflection.SERVICE_NAME
# A question is the name of a service, a type or a file. The answer repeats it.
MAX_QUESTION_BYTES = 1 << 10


class ReflectionService:
    """A stream takes a place, and its messages count in the budget for bodies."""

    def __init__(self, gateway: RequestGateway, services: Collection[str]):
        self._gateway = gateway
        self._library = reflection.aio.ReflectionServicer([*services, SERVICE])  # type: ignore[attr-defined]

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        return generic_handler(SERVICE, self.ServerReflectionInfo)

    async def ServerReflectionInfo(self, messages: AsyncIterator[bytes], context: Context) -> None:
        with self._gateway.admission.admit(caller_of(self._gateway, context), context.peer()) as place:
            answers = self._library.ServerReflectionInfo(self._questions(context, place.body), context)
            await write_all(answers, context, self._gateway.config)

    async def _questions(self, context: Context, held: HeldBytes) -> AsyncGenerator[Any, None]:
        raw = await read_message(context, self._gateway.config, held)
        while True:
            yield _question(raw)
            held.release()
            try:
                raw = await read_message(context, self._gateway.config, held)
            except (DeadlineError, InvalidRequestError):
                return  # the client asks no more


def _question(raw: bytes) -> Any:
    if len(raw) > MAX_QUESTION_BYTES:
        text = f"message: {len(raw)} bytes; a question has at most {MAX_QUESTION_BYTES}"
        raise InvalidRequestError(text, field="message", limit=str(MAX_QUESTION_BYTES))
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(raw)
    except DecodeError as error:
        raise InvalidRequestError(f"the message is not valid protobuf: {error}", field="message") from None
