"""Room for an answer before it is computed, as both frontends ask for it."""

from __future__ import annotations

from cluster.errors import OverloadedError
from cluster.security.keys import Caller
from router.admission.admission import Place
from router.gateway import RequestGateway


async def expect_answer(
    gateway: RequestGateway, caller: Caller, place: Place, served_model: str, least: int, most: int
) -> None:
    """Refuse a request before it is dispatched if the budget of bodies has no room for the most bytes that its answer may
    have; else hold the least that it will have. Its prompt has been tokenised, so a refused one counts as a request of the
    tenant's quota. Raises OverloadedError."""
    try:
        place.body.expect_answer(least, most, place.model)
    except OverloadedError:
        async with gateway.counted(caller, served_model):
            await gateway.low_priority.refuse(caller.tenant)
        raise
