"""The points at which links break on order: what follows is what a network does (cluster/faults/points.py)."""

from __future__ import annotations

import pytest

from cluster.faults.points import Act, FaultAction
from cluster.protocol.link import WINDOW_TOKENS
from tests.harness.waiting import until
from tests.router.link.conftest import PROMPT, end, tokens


class Ordered:
    """Carries one act out at the n-th passage, as cluster.faults.orders does."""

    def __init__(self, act: Act, at: int = 1):
        self.passed = 0
        self._act, self._at = act, at

    def __call__(self, whose: object) -> FaultAction | None:
        self.passed += 1
        return FaultAction(self._act) if self.passed == self._at else None


@pytest.mark.parametrize("act", [Act.RESET, Act.HALF])
async def test_a_frame_that_is_cut_is_sent_again(pair, act):
    pair.worker._listener._at_frame = ordered = Ordered(act, at=5)
    one = pair.read()
    await pair.up()
    serial = pair.link._connection.serial
    for step in range(20):
        tokens(one.log, step, 1)
        await until(lambda step=step: len(one.tokens[0]) == step + 1, "it came")
    end(one.log)
    await until(lambda: one.end is not None, "the end came")
    assert one.tokens == [list(range(20))] and one.error is None
    assert ordered.passed > 5 and pair.link._connection.serial > serial and not pair.worker.cancelled


async def test_lost_credit_is_made_good_by_the_next(pair):
    one = pair.read()
    await pair.up()
    pair.link._identity.at_credit = ordered = Ordered(Act.DROP)
    tokens(one.log, 0, WINDOW_TOKENS)
    for read in (64, 128):
        one.limit = PROMPT + read + WINDOW_TOKENS
        one.handle.credit(0, one.limit)
    tokens(one.log, WINDOW_TOKENS, 128)
    await until(lambda: len(one.tokens[0]) == WINDOW_TOKENS + 128, "all came")
    assert ordered.passed == 2


async def test_a_lost_attach_is_repeated(pair):
    one = pair.read()
    await pair.up()
    tokens(one.log, 0, 3)
    pair.link._identity.at_attach = ordered = Ordered(Act.RESET)
    pair.cut()
    await until(lambda: ordered.passed == 2 and pair.links.up() == 1, "it attached once more")
    tokens(one.log, 3, 3)
    await until(lambda: one.tokens == [list(range(6))], "nothing is lost")
    assert one.error is None and not pair.worker.cancelled
