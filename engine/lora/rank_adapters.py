"""Adapters on all ranks of a worker: read beside the steps, then written to a slot between two of them.

leader ── READ ──► every rank reads its share on a thread; steps go on
leader ── ANSWER ─► every rank answers: reading, read (with the digest), or not read (with the reason)
leader ── WRITE ──► all have read the same: each copies it into the slot, in order with the steps
leader ── DROP ───► one has not: nothing is written, and what the others have read is dropped
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from cluster.errors import ModelError, UnavailableError
from engine.lora.adapter_files import Adapter, Share, read_adapter
from engine.lora.message import LANES, AdapterMessage, Answer, Order, State
from engine.lora.reading import AdapterReading
from engine.lora.slots import AdapterSlots
from engine.parallel.group import TpGroup


class RankAdapters:
    """Reads and writes adapters on all ranks, on the thread that runs the steps. On the leader the methods tell the other
    ranks, which `follow`."""

    def __init__(self, share: Share, slots: AdapterSlots | None, group: TpGroup, device: torch.device):
        self._slots, self._group, self._device = slots, group, device
        self._share = share
        self.readings = tuple(AdapterReading(self.read) for _ in range(LANES))

    def read(self, directory: Path, stopped: threading.Event | None = None) -> Adapter:
        """This rank's share. Any thread. Raises ModelError."""
        return read_adapter(directory, self._share, stopped)

    @property
    def count(self) -> int:
        """Slots."""
        return self._slots.count if self._slots is not None else 0

    def begin(self, directory: Path, below: Path | None = None, lane: int = 0) -> None:
        """Begin to read an adapter; what was read before in this lane is dropped. `below`: it is refused where it leads
        out of this directory, which each rank sees for itself: others may be on other nodes."""
        root = str(below.absolute()) if below is not None else ""
        self._order(AdapterMessage(Order.READ, 0, str(directory.absolute()), root, lane))

    def digest(self, lane: int = 0) -> str | None:
        """The digest of the adapter that all ranks have read; None while one reads. Raises ModelError if one has not, or
        if they have read different ones, UnavailableError if one waits for an earlier reading; then nothing of it is
        kept."""
        self._tell(AdapterMessage(Order.ANSWER, lane=lane))
        answers = self._answers(lane)
        problem = _problem(answers)
        if problem:
            self.drop(lane)
            busy = any(one.state is State.BUSY for one in answers)
            raise (UnavailableError if busy else ModelError)(problem, field="lora")
        return answers[0].text if all(one.state is State.READ for one in answers) else None

    def write(self, slot: int, lane: int = 0) -> None:
        """Copy what all ranks have read into a slot, from 1 on. No sequence may be using it."""
        self._order(AdapterMessage(Order.WRITE, slot, lane=lane))

    def drop(self, lane: int = 0) -> None:
        self._order(AdapterMessage(Order.DROP, lane=lane))

    def follow(self, message: AdapterMessage) -> None:
        """Carry out an order of the leader."""
        reading = self.readings[message.lane]
        match message.order:
            case Order.READ:
                reading.begin(Path(message.directory), Path(message.below) if message.below else None)
            case Order.ANSWER:
                self._answers(message.lane)
            case Order.WRITE:
                assert self._slots is not None, "every rank has the same settings"
                self._slots.write(message.slot, reading.take())
            case Order.DROP:
                reading.drop()

    def _order(self, message: AdapterMessage) -> None:
        self._tell(message)
        self.follow(message)

    def _tell(self, message: AdapterMessage) -> None:
        if self._group.size > 1:
            self._group.share(message.to_bytes())

    def _answers(self, lane: int) -> list[Answer]:
        return Answer.all_of(self._group.gather_last(self.readings[lane].answer().to_tensor(self._device)))


def _problem(answers: list[Answer]) -> str:
    for rank, answer in enumerate(answers):
        if answer.state in (State.NOT_READ, State.BUSY):
            return answer.text if not rank else f"rank {rank}: {answer.text}"
    digests = [one.text for one in answers if one.state is State.READ]
    if len(set(digests)) > 1:
        return "the ranks of this worker find different adapters there: give all nodes the same files"
    return ""
