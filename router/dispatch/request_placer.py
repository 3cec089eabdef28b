"""Places the attempts of one request, away from the workers that it excludes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from cluster import errors
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import hash_blocks, index_keys, pack_tokens
from cluster.protocol.first_token import ends_with_first_token
from cluster.protocol.prompt_scores import computes_each_position, leave_out_prompt_logprobs
from router.dispatch.choice import ChoiceStream
from router.dispatch.deadlines import RequestDeadlines
from router.dispatch.engine_failures import EngineFailures
from router.dispatch.exclusions import exclusions
from router.dispatch.request_stats import RequestStats
from router.dispatch.services import Services
from router.placement.types import KvGroup, Placed, PlacementRequest, Reason
from router.request.completion import Completion
from wire import common_pb2

LASTING = frozenset({Reason.ADAPTER, Reason.FAULTY})  # reasons that no wait removes


class RequestPlacer:
    def __init__(
        self,
        completion: Completion,
        services: Services,
        deadlines: RequestDeadlines,
        stats: RequestStats,
        packed_prompt: bytes,
    ):
        self._completion = completion
        self._services = services
        self._deadlines = deadlines
        self._stats = stats
        self._packed_prompt = packed_prompt
        self._kv_groups: dict[int, KvGroup] = {}  # the workers that have each choice
        self._failed_kv_groups: set[KvGroup] = set()  # that gave the request nothing
        self.excluded: dict[str, Reason] = {}  # by worker_id
        self.engine_failures = EngineFailures()

    async def place(
        self, choices: list[ChoiceStream], deadline: float, *, scores: bool = True
    ) -> tuple[common_pb2.GenerateSpec, PlacementRequest, Placed]:
        """Choose workers; while there are none, wait for them up to `deadline`. `scores`: log probabilities of the prompt,
        where wanted, are still to come. Raises UnavailableError."""
        while True:
            try:
                kv_group = self._choose_kv_group(choices)
                spec = self.spec(choices, kv_group)
                if not scores:
                    leave_out_prompt_logprobs(spec)
                request = self.request(choices, spec, kv_group)
                request = self._services.without_unreachable_pairs(request)
                placed = await self._services.placement.place(request)
            except errors.UnavailableError:
                if time.monotonic() + 0.1 > deadline:
                    raise
                await asyncio.sleep(0.1)
            else:
                self._stats.placement_calls += 1
                return spec, request, placed

    def _choose_kv_group(self, choices: list[ChoiceStream]) -> KvGroup:
        """The KV group for the next attempt: the last one, once the client has something of the answer. Before that
        another one is tried: all workers of a group may be registered falsely, or broken in the same way. Raises
        UnavailableError."""
        before = self._kv_groups.get(choices[0].index)
        if before is not None and not self._stats.begun:
            self._failed_kv_groups.add(before)
            before = None
        model, failed = self._completion.served_model, self._failed_kv_groups
        if adapter := self._completion.adapter:  # in a roll, workers of one may not have loaded it yet
            failed = failed | self._services.without_adapter.kv_groups(adapter)
        kv_group = self._services.placement.kv_group(before, model, failed)
        self._kv_groups |= dict.fromkeys((choice.index for choice in choices), kv_group)
        return kv_group

    def request(
        self, choices: list[ChoiceStream], spec: common_pb2.GenerateSpec, kv_group: KvGroup
    ) -> PlacementRequest:
        c, secret = self._completion, self._services.config.secret.encode()
        packed = spec.prompt_tokens + spec.output_tokens
        hashes = hash_blocks(packed, kv_group.page_size, secret=secret, salt=spec.salt)
        taken_in = bool(self._stats.attempts or c.resume_tokens)  # never refused for being late
        return PlacementRequest(
            transfer_id=self._services.new_transfer_id(),
            chain=index_keys(hashes),
            token_count=len(packed) // 4,
            output_tokens=min(c.sampling.max_tokens, 256) * len(choices),
            excluded=self._exclusions(kv_group),
            kv_group=kv_group,
            explain=c.explain,
            priority_class=self._deadlines.priority_class,
            target_seconds=0.0 if taken_in else self._deadlines.target_seconds,
            deadline_seconds=0.0 if taken_in else self._deadlines.left_seconds,
            tenant=c.tenant,
            weight=c.weight,
            model=c.served_model,
            whole_prompt=computes_each_position(spec),
            ends_at_prefill=ends_with_first_token(spec),
        )

    def refused_by(self, worker_id: str) -> None:
        """Exclude a decode worker that had no room. Others that had none may have room by now; workers without the
        request's adapter, and those that broke the protocol, stay excluded."""
        stay = {name: reason for name, reason in self.excluded.items() if reason in LASTING}
        self.excluded = {**stay, worker_id: Reason.REFUSED}

    def broke_protocol(self, workers: Iterable[WorkerInfo]) -> None:
        """They would do so again, at each attempt that the prompt's prefix leads to them."""
        self.excluded |= {one.worker_id: Reason.FAULTY for one in workers}

    def _exclusions(self, kv_group: KvGroup) -> dict[str, Reason]:
        services, adapter = self._services, self._completion.adapter
        lacking = services.without_adapter(kv_group.model_id, adapter) if adapter else ()
        return exclusions(services.links.suspects, self.excluded, self.engine_failures.names, lacking)

    def spec(self, choices: list[ChoiceStream], kv_group: KvGroup) -> common_pb2.GenerateSpec:
        c = self._completion
        output = choices[0].output if len(choices) == 1 else []
        return common_pb2.GenerateSpec(
            model_id=kv_group.model_id,
            prompt_tokens=self._packed_prompt,
            output_tokens=pack_tokens(output),
            sampling=c.sampling,
            grammar=c.grammar,
            first_choice=choices[0].index,
            n=len(choices),
            salt=self._services.salt(kv_group.model_id, c.prefix_scope, c.adapter),
            adapter=c.adapter,
            priority=c.priority,
            tenant=c.tenant,
            weight=c.weight,
        )
