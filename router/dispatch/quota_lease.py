"""Charges a request to its tenant's quota before it is placed, and settles the charge when it has ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from router.dispatch.services import Services
from router.quota.quota import EXPECTED_OUTPUT_TOKENS, ChargedRequest, QuotaCharge, Use
from router.request.completion import Completion
from router.request.resume_tickets import GRACE_SECONDS


def quota_lease(
    services: Services,
    completion: Completion,
    name: Callable[[], bytes],
    *,
    resumed: bool,
    use: Callable[[], Use | None],
) -> contextlib.AbstractAsyncContextManager[None]:
    """Charge what the request is expected to use; at the end settle what it has used: `use()`, None if it was not served.

    Raises OverloadedError where the tenant's quota is used up, or its quota of the request's model.
    """
    if not (completion.rate_limits or completion.model_rate_limits):
        return contextlib.nullcontext()
    return _charged(services, completion, name(), resumed, use)


@contextlib.asynccontextmanager
async def _charged(
    services: Services, c: Completion, name: bytes, resumed: bool, use: Callable[[], Use | None]
) -> AsyncIterator[None]:
    prompt, held = len(c.prompt_tokens), len(c.resume_tokens)
    new = 0 if c.prompt_only else min(max(0, c.sampling.max_tokens - held), EXPECTED_OUTPUT_TOKENS)
    request = ChargedRequest(
        name.hex(),
        again=resumed,  # proven by the ticket only: a client can forge name, prompt and reconnect count
        held_tokens=held if resumed else 0,
        seconds=c.deadline_seconds + GRACE_SECONDS,
    )
    tokens, quota = prompt + held + c.n * new, services.quota
    of_model = replace(request, name=f"{request.name}:model")  # of another bucket, and so a record of its own
    buckets = ((c.rate_limits, request, ""), (c.model_rate_limits, of_model, c.served_model))
    charges: list[QuotaCharge] = []
    admitted = False  # every bucket had room
    try:
        for limits, one, model in buckets:
            charge = await quota.charge(c.tenant, limits, tokens, one, model)
            if charge is not None:
                charges.append(charge)
        admitted = True
        yield
    finally:
        used = use() if admitted else None
        for charge in charges:
            services.clean_up(quota.settle(charge, used))
