"""One fault of each kind at the links of a whole cluster under load. `make chaos-links` has the long runs."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import wrong_attempts
from tests.chaos.rows import draw_fault
from tests.chaos.short_run import assert_recovered, run_short
from tests.harness.bounds import REDISPATCH_SECONDS, allowed

SEED = "short links"
ROWS_OF_LINKS = (
    "link reset 0.2 s",
    "link reset 1 s",
    "link silent both ways 1 s",
    "link silent from the worker 3 s",
    "link reset in a frame",
    "credit lost",
    "attach lost",
    "stop router 10 s",
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_links_that_break_cost_what_they_may_and_nothing_more(checkpoint, tmp_path):
    schedule = [draw_fault(SEED, number, [row]) for number, row in enumerate(ROWS_OF_LINKS)]
    results = run_short(tmp_path, checkpoint("llama"), SEED, schedule)
    assert [result.fault for result in results] == list(ROWS_OF_LINKS)
    for result in results:
        assert_recovered(result)
        assert not wrong_attempts(result, allowed(REDISPATCH_SECONDS)), result
