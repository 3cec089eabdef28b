"""What a token costs a worker's event loop from its attempt's log to its frame, in calls: the same on every machine."""

from __future__ import annotations

from tests.harness.calls import count_calls
from tests.worker.link.hand_links import HandLink, HandWorker

HANDLES = 64
CALLS_OF_LOG = 10  # the log, its window, and its handle as due at the link
CALLS_OF_ROW = 12


async def test_a_token_of_a_step_takes_few_calls() -> None:
    worker = HandWorker()
    link, numbers = HandLink(worker, 1), list(range(1, HANDLES + 1))
    logs = [worker.open(number) for number in numbers]
    link.attach(numbers)
    link.read()

    def step() -> None:
        for log in logs:
            log.add(0, 0, 7)
            assert not log.full

    assert count_calls(step) <= CALLS_OF_LOG * HANDLES
    assert count_calls(link.session.flush) <= CALLS_OF_ROW * HANDLES
    (frame,) = link.read()
    assert list(frame.tokens.handle) == numbers
