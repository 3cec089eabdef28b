"""Reading the message of an RPC within the budget for bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cluster.config import RouterConfig
from cluster.errors import DeadlineError, InvalidRequestError, OverloadedError
from router.limits import HeldBytes

# gRPC tells how long a message is once all of it has arrived. One that takes longer than this is counted as the longest.
QUICK_SECONDS = 0.1


async def read_message(
    context: grpc.aio.ServicerContext[Any, Any], config: RouterConfig, held: HeldBytes
) -> bytes:
    """The call's message.

    Raises OverloadedError if the budget has no room for it, DeadlineError if it does not come within `body_seconds`,
    InvalidRequestError if the call ends without one.
    """
    loop = asyncio.get_running_loop()
    refusal: list[OverloadedError] = []

    def count_as_longest() -> None:
        try:
            held.grow_to(config.max_body_bytes)
        except OverloadedError as error:
            refusal.append(error)
            deadline.reschedule(loop.time())

    timer = loop.call_later(QUICK_SECONDS, count_as_longest)
    try:
        async with asyncio.timeout(config.body_seconds) as deadline:
            raw = await context.read()
    except TimeoutError:
        if refusal:
            raise refusal[0] from None
        message = f"the request's message did not come within {config.body_seconds:g} s"
        raise DeadlineError(message, field="message", limit=f"{config.body_seconds:g} s") from None
    finally:
        timer.cancel()
    if not isinstance(raw, bytes):
        raise InvalidRequestError("message: the call has none", field="message")
    held.grow_to(len(raw))
    return raw
