"""A prefill worker scripted by a test, on a stream of its own; it can also send what no honest worker sends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import torch

from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.layout.digest import XXH3_128, digest
from tests.harness.waiting import until
from tests.kv_transfer.pair import DIM, layout
from wire import common_pb2, handoff_pb2

EPOCH = 5
DECODE_EPOCH = 2
WAIT_SECONDS = 10.0


class ScriptedPeer:
    def __init__(self, receiver: HandoffReceiver, worker_id: str = "scripted", tensor_parallel: int = 1):
        self.worker = common_pb2.WorkerRef(worker_id=worker_id, epoch=EPOCH)
        self.replies: list[handoff_pb2.DecodeToPrefill] = []
        self.failure: Exception | None = None
        self._layout = layout(tensor_parallel)
        self._said: asyncio.Queue[handoff_pb2.PrefillToDecode | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._listen(receiver))

    async def _requests(self) -> AsyncIterator[handoff_pb2.PrefillToDecode]:
        while (message := await self._said.get()) is not None:
            yield message

    async def _listen(self, receiver: HandoffReceiver) -> None:
        try:
            async for reply in receiver.serve(self._requests()):
                for one in (reply, *reply.more):
                    self.replies.append(one)
        except Exception as error:
            self.failure = error

    @property
    def ended(self) -> bool:
        return self._task.done()

    def say(self, **message: Any) -> None:
        self._said.put_nowait(handoff_pb2.PrefillToDecode(**message))

    def all(self, kind: str, transfer_id: bytes | None = None) -> list[Any]:
        said = [getattr(reply, kind) for reply in self.replies if reply.WhichOneof("message") == kind]
        return [one for one in said if transfer_id in (None, getattr(one, "transfer_id", None))]

    async def received(self, kind: str, transfer_id: bytes | None = None, count: int = 1) -> Any:
        await until(
            lambda: len(self.all(kind, transfer_id)) >= count, f"{count} {kind} received", WAIT_SECONDS
        )
        return self.all(kind, transfer_id)[-1]

    def hello(self, **changed: Any) -> None:
        greeting: dict[str, Any] = {
            "prefill": self.worker,
            "decode_epoch": DECODE_EPOCH,
            "layout": self._layout,
            "transports": ["grpc"],
            "digests": "all",
            "digest_kinds": [XXH3_128],
        }
        self.say(hello=handoff_pb2.Hello(**{**greeting, **changed}))

    def ask_to_reserve(self, tokens: int, transfer_id: bytes = b"") -> bytes:
        transfer_id = transfer_id or secrets.token_bytes(16)
        spec = common_pb2.GenerateSpec(n=1, prompt_tokens=bytes(4 * tokens))
        self.say(
            reserve=handoff_pb2.Reserve(
                transfer_id=transfer_id, request_id="r", spec=spec, token_count=tokens
            )
        )
        return transfer_id

    async def reserve(self, tokens: int, transfer_id: bytes = b"") -> bytes:
        transfer_id = self.ask_to_reserve(tokens, transfer_id)
        reply = await self.received("reserve_reply", transfer_id)
        assert not reply.HasField("refused"), reply
        return transfer_id

    def want(self, transfer_id: bytes, part: int, size: int, source: int = 0, target: int = 0) -> None:
        self.say(
            slot_request=handoff_pb2.SlotRequest(
                transfer_id=transfer_id, source_rank=source, target_rank=target, part=part, bytes=size
            )
        )

    async def granted(self, transfer_id: bytes, part: int, source: int = 0) -> handoff_pb2.SlotGrant:
        def grants() -> list[Any]:
            said = self.all("slot_grant", transfer_id)
            return [one for one in said if (one.part, one.source_rank) == (part, source)]

        await until(lambda: bool(grants()), f"a slot for part {part}", WAIT_SECONDS)
        return grants()[-1]

    async def send(
        self,
        transfer_id: bytes,
        part: int,
        layers: tuple[int, int],
        tokens: tuple[int, int],
        /,
        *,
        heads: tuple[int, int] = (0, 2),
        source: int = 0,
        kind: str = XXH3_128,
        value: float = 1.0,
        **changed: Any,
    ) -> None:
        """Request a slot and fill it; `changed` overrides fields of the header."""
        count = (layers[1] - layers[0]) * 2 * (heads[1] - heads[0]) * (tokens[1] - tokens[0]) * DIM
        payload = torch.full((count,), value).view(torch.uint8)
        self.want(transfer_id, part, len(payload), source)
        grant = await self.granted(transfer_id, part, source)
        fields: dict[str, Any] = {
            "transfer_id": transfer_id,
            "prefill_epoch": EPOCH,
            "decode_epoch": DECODE_EPOCH,
            "generation": grant.generation,
            "slot": grant.slot,
            "source_rank": source,
            "part": part,
            "layer_begin": layers[0],
            "layer_end": layers[1],
            "token_begin": tokens[0],
            "token_end": tokens[1],
            "head_begin": heads[0],
            "head_end": heads[1],
            "bytes": len(payload),
            "digest_kind": kind,
            "digest": digest([payload], kind),
        }
        header = handoff_pb2.PartHeader(**{**fields, **changed})
        self.say(part=handoff_pb2.PartData(header=header, payload=payload.numpy().tobytes()))

    async def verified(self, transfer_id: bytes, part: int, source: int = 0) -> None:
        def results() -> list[Any]:
            answers = self.all("part_result", transfer_id)
            return [one for one in answers if (one.part, one.source_rank) == (part, source) and one.verified]

        await until(lambda: bool(results()), f"part {part} is verified", WAIT_SECONDS)

    def finish(self, transfer_id: bytes, *flows: tuple[int, int, int]) -> None:
        """`flows`: (source rank, target rank, parts)."""
        named = [handoff_pb2.FlowParts(source_rank=s, target_rank=t, parts=n) for s, t, n in flows]
        self.say(finish=handoff_pb2.Finish(transfer_id=transfer_id, flows=named))

    async def close(self) -> None:
        self._said.put_nowait(None)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
