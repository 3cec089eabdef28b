"""What is kept for each of several models of a limit that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.router import FurtherModel, RouterConfig
from cluster.errors import OverloadedError
from router.admission.admission import Admission
from router.admission.reserved import kept_part


@pytest.mark.parametrize(
    ("limit", "most", "models", "part"),
    [
        # Alone it has everything; of two, each has what the other may not take
        *((8, 8, 1, 0), (8, 4, 2, 0), (9, 4, 2, 0), (8, 7, 2, 0)),
        *((8, 4, 3, 2), (9, 4, 3, 2), (8, 8, 3, 0), (3, 1, 3, 1), (16, 8, 4, 2), (16, 8, 5, 2)),
    ],
)
def test_a_part_is_kept_for_each_of_three_or_more(limit: int, most: int, models: int, part: int) -> None:
    assert kept_part(limit, most, models) == part
    assert most + part * (models - 1) <= limit, "one has the most that it may, and the others their parts"


def admission(models: int, limit: int) -> Admission:
    further = [FurtherModel(name=name, model=Path("/m")) for name in "bcde"[: models - 1]]
    config = RouterConfig.model_validate(
        {"model": "/m/a", "models": further, "max_concurrent_requests": limit}
    )
    return Admission(config, lambda tenant: None)


@pytest.mark.parametrize(("models", "bounded"), [(1, False), (2, False), (3, True)])
def test_two_models_need_no_count_beyond_their_own(models: int, bounded: bool) -> None:
    """That a request of one of two models looked up what the other has would cost each request, and bound nothing."""
    made = admission(models, 8)
    assert bool(made._beyond) == bool(made.bodies._beyond) == bounded


@pytest.mark.parametrize("limit", [8, 9])
@pytest.mark.parametrize("first", "ab")
def test_of_two_models_each_has_half_whatever_the_other_takes(first: str, limit: int) -> None:
    made = admission(2, limit)
    half = limit // 2
    for _ in range(half):
        made.admit().of_model(first)
    with (
        pytest.raises(OverloadedError, match=f"this model has {half} requests in flight$"),
        made.admit() as further,
    ):
        further.of_model(first)
    for _ in range(half):
        made.admit().of_model("b" if first == "a" else "a")
