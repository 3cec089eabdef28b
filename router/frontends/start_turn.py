"""A request's turn to start, as both frontends wait for it."""

from __future__ import annotations

from cluster.security.keys import Caller
from router.admission.start_queue import Client
from router.gateway import RequestGateway


async def start_turn(
    gateway: RequestGateway, caller: Caller, model: str, client: Client | None = None
) -> None:
    """Wait for the tenant's turn to start a request, or one more prompt of this one, among those for `model`.

    Raises CancelledError (cluster.errors) if its `client` disconnects meanwhile.
    """
    model = model if gateway.further else ""  # all wait in one queue
    await gateway.admission.starts.turn(caller.tenant, caller.weight, client, model)
