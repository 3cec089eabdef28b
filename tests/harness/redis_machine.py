"""What state machines of scripts in Redis share: a namespace of their own, an event loop, and the end of both."""

from __future__ import annotations

import asyncio
import secrets

import redis
from hypothesis.stateful import RuleBasedStateMachine


class RedisMachine(RuleBasedStateMachine):
    def __init__(self, client: redis.Redis, url: str) -> None:
        super().__init__()
        self.client = client
        self.url = url
        self.loop = asyncio.new_event_loop()
        self.namespace = f"test-{secrets.token_hex(4)}"

    def teardown(self) -> None:
        self.loop.close()
        for key in self.client.scan_iter(f"{{{self.namespace}}}:*"):
            self.client.delete(key)
