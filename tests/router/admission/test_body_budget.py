"""The budget of the bytes of bodies and answers: used to its last byte, empty once all have ended."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import OverloadedError
from router.admission.admission import FREE_BYTES, MODEL_HOLDER, ByteBudget
from tests.router.admission.budgets import MIB, budget, held_by


def test_bytes_of_a_model_return_to_zero_in_any_order() -> None:
    """Bodies that grow, what answers repeat, and answers: no model takes more than its share, none keeps any."""
    draw, models = random.Random(7), ("a", "b")
    bodies = ByteBudget(8 * MIB, 8 * MIB, lambda tenant: None, model_limit=4 * MIB)
    counted = bodies._tenants
    for _ in range(300):
        held = [bodies.hold("t") for _ in range(3)]
        for _ in range(12):
            one, size = draw.choice(held), draw.randrange(5 * MIB)
            calls = (
                lambda one=one, size=size: one.grow_to(size),
                lambda one=one: one.of_model(draw.choice(models)),
                lambda one=one, size=size: one.keep(size),
                lambda one=one, size=size: one.hold_answer(size, draw.choice(models)),
                one.release,
            )
            with contextlib.suppress(OverloadedError):
                draw.choice(calls)()
            assert all(0 <= counted.here(MODEL_HOLDER + model) <= 4 * MIB for model in models)
        for one in held:
            one.release()
        assert bodies.held == 0 and not any(counted.here(MODEL_HOLDER + model) for model in models)


def test_an_answer_takes_the_place_of_its_body_and_fits_an_empty_budget() -> None:
    bodies = budget(3 * MIB, MIB)
    one, other = bodies.hold("a"), bodies.hold("a")
    one.grow_to(MIB // 2)
    one.hold_answer(FREE_BYTES)
    assert bodies.held == 0
    one.hold_answer(20 * MIB)
    assert bodies.held == MIB, "as many as the tenant may have"
    with pytest.raises(OverloadedError):
        other.hold_answer(FREE_BYTES + 1)
    bodies.hold("b").hold_answer(MIB)
    one.release()
    assert bodies.held == MIB - FREE_BYTES


def test_a_budget_is_used_up_to_its_last_byte_and_no_further() -> None:
    bodies = budget(100, 100)
    first, second = bodies.hold("a"), bodies.hold("b")
    first.grow_to(FREE_BYTES)
    assert held_by(bodies) == (0, 0)
    first.grow_to(FREE_BYTES + 60)
    second.grow_to(FREE_BYTES + 40)
    with pytest.raises(OverloadedError):
        second.grow_to(FREE_BYTES + 41)
    assert bodies.held == 100, "a refusal takes nothing"
    for held in (first, second, first, second):
        held.release()
    assert held_by(bodies) == (0, 0), "once, also when it is released twice"


def test_a_body_that_grows_is_counted_once() -> None:
    bodies = budget(1000, 1000)
    held = bodies.hold("a")
    for size in range(0, FREE_BYTES + 1001, 100):
        held.grow_to(size)
    held.grow_to(FREE_BYTES + 1000)
    assert bodies.held == 1000
    held.release()
    assert held_by(bodies) == (0, 0)


def test_what_an_answer_repeats_of_a_body_stays_counted() -> None:
    bodies = budget(1000, 1000)
    held, other = bodies.hold("a"), bodies.hold("b")
    held.grow_to(FREE_BYTES + 600)
    held.keep(FREE_BYTES + 100)
    assert bodies.held == 100
    held.keep(FREE_BYTES + 150)  # numbers may be longer than in the body
    other.grow_to(FREE_BYTES + 850)
    with pytest.raises(OverloadedError):
        held.keep(FREE_BYTES + 151)
    assert bodies.held == 1000
    for one in (held, other):
        one.keep(0)
    assert held_by(bodies) == (0, 0)
    held.release()
    assert held_by(bodies) == (0, 0)


def test_a_tenant_has_its_own_part_of_the_budget_to_its_last_byte() -> None:
    bodies = budget(1000, 100)
    bodies.hold("a").grow_to(FREE_BYTES + 100)
    with pytest.raises(OverloadedError, match="tenant"):
        bodies.hold("a").grow_to(FREE_BYTES + 1)
    bodies.hold("b").grow_to(FREE_BYTES + 100)


def test_a_body_of_the_largest_size_fits_under_any_settings() -> None:
    sizes = {"max_body_bytes_in_flight": MIB, "max_body_bytes_in_flight_per_tenant": MIB}
    config: Any = SimpleNamespace(max_body_bytes=8 * MIB, **sizes, models=())
    ByteBudget.of(config, lambda tenant: None).hold("a").grow_to(8 * MIB)
