"""Reports about the end of a worker, from threads of its ranks and at any time of its life."""

from __future__ import annotations

import asyncio
import threading

from cluster.errors import InternalError
from worker.ending import Ending, WorkerFailure
from worker.ranks.process import RankRaised

LONG = 60.0


def on_a_thread(function, *arguments) -> None:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


async def test_a_rank_that_fails_before_the_role_exists_is_reported_to_it():
    ending = Ending(further_ranks=1)
    seen: list[WorkerFailure] = []
    on_a_thread(ending.rank_failed, InternalError("rank 1 has died"))
    assert str(await asyncio.wait_for(ending.failure(), LONG)) == "rank 1 has died"
    ending.on_failure(seen.append)
    await asyncio.sleep(0)
    assert [(str(one.error), one.engine) for one in seen] == [("rank 1 has died", None)]


async def test_the_first_failure_counts():
    ending, seen = Ending(further_ranks=1), list[WorkerFailure]()
    ending.on_failure(seen.append)
    on_a_thread(ending.rank_failed, RankRaised("IndexError"))
    on_a_thread(ending.rank_failed, InternalError("rank 1 has died"))
    await asyncio.wait_for(ending.failure(), LONG)
    await asyncio.sleep(0)
    assert [str(one.error) for one in seen] == ["IndexError"]
    assert seen[0].engine is not None and "IndexError" in seen[0].engine.message


async def test_the_first_request_to_drain_counts():
    ending = Ending(further_ranks=1)
    assert ending.then == "exit"
    on_a_thread(ending.ask_drain, "stay")
    on_a_thread(ending.rank_leaving)
    assert await asyncio.wait_for(ending.drain_asked(), LONG) == "stay"
    await asyncio.sleep(0)
    then: str = ending.then  # mypy takes it for "exit" since the first assertion
    assert then == "stay" and not ending.has_failed
