"""Strategies of the decode worker's state machine, its model of landed KV, and the transitions it must reach."""

from __future__ import annotations

from enum import Enum
from typing import Any

from cluster.protocol.block_hash import pack_tokens
from cluster.state_machine import StateMachine
from decode_worker import attempt
from kv_transfer import messages as m
from kv_transfer.decode_side import incoming
from tests.decode_worker.decode_world import LAYERS, Stream
from tests.engine.fake_model import PAGE
from tests.harness.reached import Reached
from wire import common_pb2

TRANSFERS = [bytes([i]) * 16 for i in range(1, 10)]
SALT = bytes(16)
NEW = 6
# This machine has no local prefill; Decode.Run has a test of its own.
NOT_DRAWN = {"decode expected → decoding"}
REFUSALS = [
    "Hello StaleEpochError",
    "Reserve StaleTransferError",
    "Reserve DrainingError",
    "Reserve BlocksExhaustedError",
    "Finish StaleTransferError",
    "Finish not true",
    "Finish without every token",
    "part too many",
    "part of another peer",
    "part corrupted twice",
    "part late",
    "blocks taken back",
]
OTHERS = ["prefix held", "nothing to ship", "half a part", "Drained acknowledged", "commit under way"]


def steps(kind: str, table: dict[Any, frozenset[Any]]) -> list[str]:
    return [step_name(kind, old, new) for old, news in table.items() for new in news]


def step_name(kind: str, old: Enum, new: Enum) -> str:
    return f"{kind} {old.value} → {new.value}"


TABLES: dict[str, dict[Any, frozenset[Any]]] = {
    "hand-off": incoming.TRANSITIONS,
    "decode": attempt.TRANSITIONS,
}
ALL_STEPS = [name for kind, table in TABLES.items() for name in steps(kind, table)]
REACHED = Reached([*(set(ALL_STEPS) - NOT_DRAWN), *REFUSALS, *OTHERS])


class CountedMachine(StateMachine[Any]):
    """Replaces the product's StateMachine for hand-offs and attempts, and counts transitions."""

    def __init__(self, initial: Any, table: Any, name: str = ""):
        super().__init__(initial, table, name)
        self._kind = "decode" if name.startswith("decode") else "hand-off"

    def to(self, new: Any) -> None:
        old = self.state
        super().to(new)
        REACHED.hit(step_name(self._kind, old, new))


def prompt_of(transfer_id: bytes) -> list[int]:
    """One of three prompts, shared by several transfers, so that later ones hit the cache; one has whole blocks only."""
    number = (transfer_id[0] - 1) % 3 + 1
    return [3 + (number * 7 + i) % 90 for i in range(5 + number)]


def spec_of(transfer_id: bytes) -> common_pb2.GenerateSpec:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    prompt = pack_tokens(prompt_of(transfer_id))
    return common_pb2.GenerateSpec(model_id="m", prompt_tokens=prompt, sampling=sampling, n=1, salt=SALT)


class Landed:
    """Model of the KV that has landed for each transfer, from the rank's messages."""

    def __init__(self) -> None:
        self._here: dict[bytes, set[tuple[int, int]]] = {}  # (layer, token)
        self._held: dict[bytes, int] = {}

    def told(self, told: m.ExpectTransfer) -> None:
        self._here[told.transfer_id] = set()
        self._held[told.transfer_id] = told.held_tokens
        if told.held_tokens:
            REACHED.hit("prefix held")

    def held(self, transfer_id: bytes) -> int:
        return self._held.get(transfer_id, 0)

    def add(self, transfer_id: bytes, layer: int, tokens: tuple[int, int]) -> None:
        self._here[transfer_id] |= {(layer, token) for token in range(*tokens)}

    def whole(self, transfer_id: bytes) -> bool:
        return self.whole_tokens(transfer_id) == len(prompt_of(transfer_id))

    def whole_tokens(self, transfer_id: bytes) -> int:
        """Number of leading tokens that have landed in every layer."""
        here, token = self._here[transfer_id], self._held[transfer_id]
        while all((layer, token) in here for layer in range(LAYERS)):
            token += 1
        return token


def note_replies(stream: Stream, since: int) -> None:
    """Count the replies of a stream from index `since` on."""
    for reply in stream.replies[since:]:
        kind = reply.WhichOneof("message")
        if kind == "welcome" and reply.welcome.HasField("refused"):
            REACHED.hit(f"Hello {reply.welcome.refused.code}")
        elif kind == "reserve_reply" and reply.reserve_reply.HasField("refused"):
            _hit_if_named(f"Reserve {reply.reserve_reply.refused.code}")
        elif kind == "drained_ack":
            REACHED.hit("Drained acknowledged")
        elif kind == "aborted":
            _note_aborted(reply.aborted.error)


def _note_aborted(error: common_pb2.ErrorDetail) -> None:
    if error.field == "finish":
        REACHED.hit("Finish without every token" if "every layer" in error.message else "Finish not true")
    elif error.field == "part":
        REACHED.hit("part too many")
    elif error.code == "DigestMismatchError":
        REACHED.hit("part corrupted twice")
    elif error.code == "BlocksExhaustedError":
        REACHED.hit("blocks taken back")
    elif error.code == "StaleTransferError":
        REACHED.hit("Finish StaleTransferError")


def _hit_if_named(name: str) -> None:
    if name in REACHED.counts:
        REACHED.hit(name)


assert PAGE == 4, "prompt_of makes whole blocks of 8 tokens"
