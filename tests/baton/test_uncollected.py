"""The garbage collector is off during imports only."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from baton.processes.uncollected import uncollected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_is_off_inside_and_on_again_after() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
