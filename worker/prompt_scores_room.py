"""Bounds the log probabilities of prompts that wait in a worker's logs for routers to read them.

All of a prompt's are computed at once, 5 MiB for 32,000 tokens with 20 alternatives, and routers take them as their
clients read. A request that asks for some waits until there is room, before its turn at the engine; a tenant that holds
none in a class enters beyond the bound, so that clients which do not read keep no other tenant out, and requests that hold
room while they wait for their turn keep none of a higher class out.
"""

from __future__ import annotations

from cluster.protocol.priority import class_of
from wire import common_pb2
from worker.admission import Admission
from worker.attempt_log import AttemptLog

MAX_UNREAD_BYTES = 64 << 20
ENTRY_BYTES = 8  # an id and a log probability, as they are packed
TOKEN_BYTES = 4  # its rank


class PromptScoresRoom:
    def __init__(self, aging_seconds: float, max_bytes: int = MAX_UNREAD_BYTES):
        self._admission = Admission(max_bytes, aging_seconds, engine_full=lambda: True)

    @property
    def held_bytes(self) -> int:
        return self._admission.inside_tokens

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    def waiting_by_class(self) -> dict[str, int]:
        return self._admission.waiting_by_class()

    def oldest_seconds(self) -> float:
        """How long the oldest request has waited. Any thread."""
        return self._admission.oldest_seconds()

    async def enter(self, spec: common_pb2.GenerateSpec, log: AttemptLog, seconds: float) -> None:
        """Return once there is room; the log gives it back when nearly all is read, or when it is forgotten. Raises
        DeadlineError after `seconds`."""
        if not spec.sampling.prompt_logprobs:
            return
        tokens, holder = len(spec.prompt_tokens) // 4, f"{spec.tenant}\0{class_of(spec.priority)}"
        size = tokens * (TOKEN_BYTES + ENTRY_BYTES * (1 + spec.sampling.prompt_top_logprobs))
        await self._admission.enter(size, spec.priority, seconds, holder, spec.weight)
        log.hold_room(lambda: self._admission.leave(size, holder))
