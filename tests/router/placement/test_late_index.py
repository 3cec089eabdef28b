"""A prefix index that answers late counts as down once it has done so for a while."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.membership.types import WorkerInfo
from router.placement.place_script import RETRY_SECONDS
from router.placement.prefix_index import LATE_FOR_SECONDS, LATE_SECONDS, PrefixIndex
from router.placement.types import Placed, PlacementRequest

CANDIDATES: Any = SimpleNamespace(model_id="m", slots=b"")
REQUEST = PlacementRequest(b"t", b"12345678", 16, 1)
HELD = b"\0\0\0\1"  # a block, at workers that it does not name


@dataclass
class Index:
    """Its answers take as long as is told."""

    now: float = 100.0
    index: PrefixIndex = field(init=False)
    asked: int = 0

    def __post_init__(self) -> None:
        config = RouterConfig(model="/m", redis_url="redis://127.0.0.1:1", index_url="redis://127.0.0.1:2")
        self.index = PrefixIndex(config, random.Random(1), clock=lambda: self.now)

    async def match(self, seconds: float, *, fails: bool = False) -> bytes:
        async def answer(*_: Any) -> bytes:
            self.asked += 1
            self.now += seconds
            if fails:
                raise TimeoutError
            return HELD

        self.index._match = answer  # type: ignore[assignment]
        return await self.index.match(REQUEST, CANDIDATES, 0.5)


@pytest.fixture
async def index() -> AsyncIterator[Index]:
    made = Index()
    yield made
    await made.index.close()


LATE = LATE_SECONDS + 0.01


async def test_one_that_only_answers_late_is_left_after_a_while(index):
    began = index.now
    while index.now + LATE < began + LATE_FOR_SECONDS:
        assert await index.match(LATE) == HELD and index.index.up
    assert await index.match(LATE) == HELD, "what was waited for is used"
    assert not index.index.up and index.index.errors["match"] == 1
    asked = index.asked
    assert await index.match(LATE) == b"" and index.asked == asked, "the next placement does not wait"


async def test_answers_in_time_between_late_ones_keep_it(index):
    for _ in range(int(4 * LATE_FOR_SECONDS / LATE)):
        assert await index.match(LATE) == HELD
        assert await index.match(LATE_SECONDS) == HELD and index.index.up
    assert index.index.errors["match"] == 0


@pytest.mark.parametrize("lost", ["late", "silent"])
async def test_it_is_back_with_an_answer_in_time_and_not_before(index, lost):
    for _ in range(2):
        await index.match(LATE_FOR_SECONDS, fails=lost == "silent")
        index.now += RETRY_SECONDS
    assert not index.index.up
    assert await index.match(LATE) == HELD and not index.index.up
    index.now += RETRY_SECONDS
    assert await index.match(LATE_SECONDS / 2) == HELD and index.index.up


@pytest.mark.parametrize(
    ("slots", "answer"),
    [
        (0, 10**12), (0, None), (0, [HELD]), (0, b""), (0, b"\0\0\0"), (0, b"\0\0\0\2"),
        (0, HELD + (b"\0\0\0\7" + b"\0\0\0\2")), (0, HELD * (1 + 2 * 33)), (2, HELD), (2, HELD + b"\0\0\0\2"),
    ],
)  # fmt: skip
async def test_an_answer_of_another_form_is_none(index, slots, answer):
    async def said(*_: Any) -> Any:
        return answer

    index.index._match = said
    candidates: Any = SimpleNamespace(model_id="m", slots=b"\0\0\0\7" * slots)
    assert await index.index.match(REQUEST, candidates, 0.5) == b""
    assert not index.index.up and index.index.errors["match"] == 1


@pytest.mark.parametrize(("slots", "answer"), [(0, HELD), (0, HELD + b"\0\0\0\7" + HELD), (2, HELD * 2)])
async def test_answers_of_both_forms_are_taken(index, slots, answer):
    async def said(*_: Any) -> Any:
        return answer

    index.index._match = said
    candidates: Any = SimpleNamespace(model_id="m", slots=b"\0\0\0\7" * slots)
    assert await index.index.match(REQUEST, candidates, 0.5) == answer


async def test_nothing_is_recorded_while_it_is_down(index):
    sent: list[Any] = []

    def send(*arguments: Any) -> bool:
        sent.append(arguments)
        return True

    index.index._record.send = send
    info = WorkerInfo("d", 1, 4, "decode", "m", "h:1", "", b"", "", "h", 4096, 1000)
    placed = Placed(None, info, 0, 0, True)
    index.index.record(REQUEST, placed)
    assert len(sent) == 1
    await index.match(0.0, fails=True)
    assert not index.index.up
    index.index.record(REQUEST, placed)
    assert len(sent) == 1, "it would fill a connection that is not read"
