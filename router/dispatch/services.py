"""What every request's life uses: one bundle per router."""

from __future__ import annotations

import secrets
from collections.abc import Coroutine
from typing import Any

from cluster.block_hash import make_salt
from cluster.config import RouterConfig
from cluster.errors import UnavailableError
from cluster.follow_ups import FollowUps
from cluster.membership.reader import Members
from router.dispatch.channels import Channels
from router.dispatch.liveness import Liveness
from router.placement.placement import Placement
from router.quota.quota import Quota
from router.tokens.tokenizer import ModelText

MAX_SALTS = 4096  # tenants whose salt is kept at hand


class Services:
    def __init__(
        self,
        config: RouterConfig,
        text: ModelText,
        members: Members,
        placement: Placement,
        channels: Channels,
        quota: Quota,
    ):
        self.config = config
        self.text = text
        self.members = members
        self.placement = placement
        self.channels = channels
        self.quota = quota
        self._salts: dict[tuple[str, str], bytes] = {}
        self.liveness = Liveness()
        self._cleanups = FollowUps()

    def new_transfer_id(self) -> bytes:
        return secrets.token_bytes(16)

    def model_id(self) -> str:
        """Raises UnavailableError before the first worker has come."""
        workers = self.members.all
        if not workers:
            raise UnavailableError("no worker is there", retry_after_seconds=1.0)
        return workers[0].model_id

    def salt(self, model_id: str, prefix_scope: str) -> bytes:
        """Of a model's block hashes, for those who share prefixes."""
        known = self._salts.get((model_id, prefix_scope))
        if known is None:
            if len(self._salts) >= MAX_SALTS:
                self._salts.clear()
            known = self._salts[model_id, prefix_scope] = make_salt(model_id, tenant=prefix_scope)
        return known

    def clean_up(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs on after the request is over: a client that has gone must not wait for it."""
        self._cleanups.spawn(coroutine)

    async def finish(self, seconds: float) -> None:
        await self._cleanups.wait(seconds)
