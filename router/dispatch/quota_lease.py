"""Charges a request to its tenant's quota before it is placed, and settles the charge when it has ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from router.dispatch.services import Services
from router.quota.quota import EXPECTED_OUTPUT_TOKENS, ChargedRequest, Use
from router.request.completion import Completion
from router.request.resume_tickets import GRACE_SECONDS


@contextlib.asynccontextmanager
async def quota_lease(
    services: Services, completion: Completion, name: bytes, *, resumed: bool, use: Callable[[], Use | None]
) -> AsyncIterator[None]:
    """Charge what the request is expected to use; at the end settle what it has used: `use()`, None if it was not served.

    Raises OverloadedError where the quota is used up.
    """
    c = completion
    prompt, held = len(c.prompt_tokens), len(c.resume_tokens)
    new = 0 if c.prompt_only else min(max(0, c.sampling.max_tokens - held), EXPECTED_OUTPUT_TOKENS)
    request = ChargedRequest(
        name.hex(),
        again=resumed,  # proven by the ticket only: a client can forge name, prompt and reconnect count
        held_tokens=held if resumed else 0,
        seconds=c.deadline_seconds + GRACE_SECONDS,
    )
    charge = await services.quota.charge(c.tenant, c.rate_limits, prompt + held + c.n * new, request)
    try:
        yield
    finally:
        if charge is not None:
            services.clean_up(services.quota.settle(charge, use()))
