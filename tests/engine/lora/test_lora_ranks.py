"""Ranks read an adapter beside the steps, and write it together or not at all."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.errors import ModelError, UnavailableError
from cluster.membership.adapter_refusals import Refusal
from engine.lora.adapter_files import Adapter
from engine.lora.loaded import LoadedAdapters
from engine.lora.message import ANSWER_BYTES, LANES, AdapterMessage, Answer, Order, State
from engine.lora.rank_adapters import RankAdapters
from engine.lora.reading import AdapterReading
from tests.engine.ranks import ThreadGroup

WAIT_SECONDS = 10.0  # far more than any of this takes
A = Path("/adapters/a")


class Slots:
    count = 2

    def __init__(self) -> None:
        self.written: list[tuple[int, str]] = []

    def write(self, slot: int, adapter: Adapter) -> None:
        self.written.append((slot, adapter.digest))


class World:
    """Two ranks; `reads` says what each finds in a directory."""

    def __init__(self, *reads: Any):
        barrier, box = threading.Barrier(2, timeout=WAIT_SECONDS), [None, None]
        self.slots = [Slots(), Slots()]
        self.ranks = []
        self.groups = [ThreadGroup(rank, 2, barrier, box) for rank in range(2)]
        for slots, group, read in zip(self.slots, self.groups, reads, strict=True):
            share: Any = SimpleNamespace()
            made = RankAdapters(share, slots, group, torch.device("cpu"))  # type: ignore[arg-type]
            made.readings = tuple(AdapterReading(read) for _ in range(LANES))
            self.ranks.append(made)
        self.leader = LoadedAdapters(self.ranks[0])
        self.steps = 0
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def _follow(self) -> None:
        while content := self.groups[1].share(None):
            message = AdapterMessage.of(content)
            if message is not None:
                self.ranks[1].follow(message)

    def step(self) -> None:
        """One that both ranks compute."""
        self.groups[0].share(b"step")
        self.steps += 1

    def digest(self) -> str:
        """Once both have answered; a step between two questions."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := self.leader.read_digest()) is None:
            assert time.monotonic() < deadline
            self.step()
        return found

    def close(self) -> None:
        self.groups[0].share(None)
        self._follower.join(WAIT_SECONDS)
        assert not self._follower.is_alive()

    @property
    def written(self) -> list[list[tuple[int, str]]]:
        return [one.written for one in self.slots]

    @property
    def kept(self) -> bool:
        return any(one._attempt is not None for rank in self.ranks for one in rank.readings)


def found(digest: str = "d") -> Any:
    return lambda directory, stopped: Adapter(digest, directory, 1, {})


def raising(error: Exception) -> Any:
    def read(directory: Path, stopped: threading.Event) -> Adapter:
        raise error

    return read


def test_steps_go_on_while_a_rank_reads():
    go = threading.Event()

    def slowly(directory: Path, stopped: threading.Event) -> Adapter:
        assert go.wait(WAIT_SECONDS)
        return Adapter("d", directory, 1, {})

    world = World(found(), slowly)
    world.leader.begin(A)
    for _ in range(50):
        world.step()
        assert world.leader.read_digest() is None
    assert world.steps == 50 and world.written == [[], []]
    go.set()
    world.leader.write(world.digest())
    world.close()
    assert world.written == [[(1, "d")]] * 2
    assert not world.kept


def test_a_lane_whose_files_do_not_answer_leaves_the_others():
    """By patched reads: one directory's never ends."""
    never = threading.Event()

    def reads(directory: Path, stopped: threading.Event) -> Adapter:
        if directory.name == "slow":
            never.wait()
        return Adapter(directory.name, directory, 1, {})

    world = World(reads, reads)
    world.leader.begin(Path("/adapters/slow"))
    world.leader.begin(A, lane=1)
    deadline = time.monotonic() + WAIT_SECONDS
    while (digest := world.leader.read_digest(1)) is None:
        assert time.monotonic() < deadline
    assert world.leader.read_digest() is None
    world.leader.write(digest, lane=1)
    world.leader.drop()
    never.set()
    world.close()
    assert world.written == [[(1, "a")]] * 2 and not world.kept


def test_an_adapter_is_not_refused_for_the_files_of_another_one(monkeypatch):
    """It is tried again: what a load call waits for is not final."""
    monkeypatch.setattr("engine.lora.reading.FORMER_SECONDS", 0.01)
    never = threading.Event()

    def hangs(directory: Path, stopped: threading.Event) -> Adapter:
        never.wait()
        raise OSError

    world = World(found(), hangs)
    world.leader.begin(A)
    world.leader.begin(A)
    with pytest.raises(UnavailableError, match="rank 1: an earlier reading") as caught:
        world.digest()
    assert not Refusal.of("t", caught.value).final
    never.set()
    world.step()
    world.close()


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        ((found(), raising(OSError("stale file handle"))), "rank 1: stale file handle"),
        ((found(), raising(MemoryError())), "rank 1: MemoryError"),
        ((raising(ModelError("r is too high")), found()), "r is too high"),
        ((found(), raising(RuntimeError("x" * 9999))), "rank 1: xxx"),
        ((found("a"), found("b")), "different adapters"),
    ],
)
def test_what_one_rank_does_not_read_none_writes(reads, says):
    world = World(*reads)
    world.leader.begin(A)
    with pytest.raises(ModelError, match=says):
        world.digest()
    world.step()
    world.close()
    assert world.written == [[], []]
    assert not world.kept


def test_one_rank_that_fails_stops_the_others():
    told: list[bool] = []

    def until_stopped(directory: Path, stopped: threading.Event) -> Adapter:
        told.append(stopped.wait(WAIT_SECONDS))
        return Adapter("d", directory, 1, {})

    world = World(raising(OSError("gone")), until_stopped)
    world.leader.begin(A)
    with pytest.raises(ModelError, match="gone"):
        world.digest()
    (thread,) = world.ranks[1].readings[0]._threads
    world.close()
    thread.join(WAIT_SECONDS)
    assert told == [True] and world.ranks[1].readings[0].answer().state is State.NOT_READ


def test_a_rank_does_not_follow_links_out_of_the_directory(tmp_path):
    """On its own node, whatever the leader finds on that of its own."""
    (tmp_path / "dir" / "a").mkdir(parents=True)
    (tmp_path / "dir" / "out").symlink_to(tmp_path)
    root, world = tmp_path / "dir", World(found(), found())
    begin = world.ranks[0].readings[0].begin
    world.ranks[0].readings[0].begin = lambda directory, below=None: begin(directory)  # type: ignore[method-assign]
    for name in ("out", ".", "a/../.."):
        world.leader.begin(root / name, root)
        with pytest.raises(ModelError, match=r"rank 1: .* is not below"):
            world.digest()
    world.leader.begin(root / "a", root)
    assert world.digest() == "d"
    world.close()


def test_readings_that_never_end_do_not_add_up(monkeypatch):
    """Also where the one before has only waited for the one that hangs."""
    monkeypatch.setattr("engine.lora.reading.FORMER_SECONDS", 0.01)
    never, begun = threading.Event(), []

    def hangs(directory: Path, stopped: threading.Event) -> Adapter:
        begun.append(directory)
        never.wait()
        raise OSError

    reading = AdapterReading(hangs)
    reading.begin(A)
    for _ in range(4):
        reading.drop()
        reading.begin(A)
        reading._threads[-1].join(WAIT_SECONDS)
        assert reading.answer().state is State.BUSY and "lora_dir" in reading.answer().text
    assert begun == [A]
    never.set()


def test_a_rank_without_threads_says_so(monkeypatch):
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reading = AdapterReading(found())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        reading.begin(A)
    assert reading.answer() == Answer(State.NOT_READ, "can't start new thread")


def test_answers_and_orders_travel():
    texts = ["", "d" * 32, "ü" * 600]
    given = [Answer(State.READING), *(Answer(State.READ, text) for text in texts[1:])]
    gathered = torch.cat([one.to_tensor(torch.device("cpu")) for one in given], -1)
    read = Answer.all_of(gathered)
    assert read[:2] == given[:2]
    assert read[2].text.startswith("ü" * 200) and len(read[2].text.encode()) < ANSWER_BYTES + 3
    message = AdapterMessage(Order.READ, 0, "/ä/b", "/ä", 3)
    assert AdapterMessage.of(message.to_bytes()) == message
    assert AdapterMessage.of(b"\1\0\0\0") is None
