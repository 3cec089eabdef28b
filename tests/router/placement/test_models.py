"""A router of several models: each has its own workers, and what befalls one leaves the others untouched."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.router import FurtherModel, RouterConfig
from cluster.config.worker import Role
from cluster.errors import OverloadedError, UnavailableError
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import make_salt
from router.admission.admission import FREE_BYTES, Admission
from router.placement.calibration import Calibrations
from router.placement.candidates import Candidates, Heads
from router.placement.eligibility import MAX_LISTED, Eligibility
from router.placement.types import Mode, PlacementRequest
from wire import common_pb2

MODELS = ("first", "second")


def worker(role: Role, index: int, model_id: str, served: str = "") -> WorkerInfo:
    layout = common_pb2.KvLayout(wire_version=1, model_id=model_id, dtype="bfloat16", page_size=16)
    name = f"{role}-{index}"
    made = WorkerInfo(name, 1, index, role, model_id, "a:1", "", layout.SerializeToString(), "", "h", 64, 9)
    return replace(made, served_model=served)


def eligibility(*workers: WorkerInfo, mode: Mode = "fallback") -> Eligibility:
    return Eligibility(workers, mode, models=MODELS)


def chosen(view: Eligibility, model: str) -> set[str]:
    return {view.kv_groups(model).choose(None, random.Random(seed)).model_id for seed in range(50)}


A, B = worker("decode", 0, "aa"), worker("decode", 1, "bb", "second")


def test_a_request_goes_to_workers_of_its_model() -> None:
    """The first model has the workers that name none."""
    view = eligibility(A, B, worker("decode", 2, "cc", "unknown"))
    assert (chosen(view, "first"), chosen(view, "second")) == ({"aa"}, {"bb"})
    group = view.kv_groups("second").choose(None, random.Random())
    request = PlacementRequest(b"t", b"", 16, 1, {}, group, model="second")
    assert [one.worker_id for one in view.usable("decode", request)] == ["decode-1"]


def test_models_of_one_checkpoint_have_their_own_workers() -> None:
    """Their KV groups are equal: requests went to the workers of both, and the limits and sizes of each were another's."""
    other = worker("decode", 2, "aa", "second")
    view = eligibility(A, other, worker("prefill", 3, "aa"), worker("prefill", 4, "aa", "second"))
    for name, own in (("first", ["decode-0", "prefill-3"]), ("second", ["decode-2", "prefill-4"])):
        group = view.kv_groups(name).choose(None, random.Random())
        request = PlacementRequest(b"t", b"", 16, 1, {}, group, model=name)
        found = view.for_script(request, listed=False)
        assert isinstance(found, Candidates)
        assert [one.worker_id for one in (*found.decode, *found.prefill)] == own
        assert [one.worker_id for one in view.workers if view.why_not(one, request) is None] == own
        assert view.pool(group, name).decode == {found.decode[0].name}


def test_a_large_fleet_of_two_models_of_one_checkpoint_is_named_one_by_one() -> None:
    """The sets in Redis are of both."""
    both = [worker("decode", i, "aa", "second" if i % 2 else "") for i in range(4 * MAX_LISTED)]
    for workers, kind in ((both, Candidates), (both[::2], Heads)):
        view = eligibility(*workers)
        group = view.kv_groups("first").choose(None, random.Random())
        request = PlacementRequest(b"t", b"", 16, 1, {}, group, model="first")
        found = view.for_script(request, listed=False)
        assert isinstance(found, kind)
        if isinstance(found, Candidates):
            assert {one.served_model for one in found.decode} == {""} and found.of_many


def test_a_roll_of_one_model_leaves_the_others() -> None:
    view = eligibility(A, B, worker("decode", 2, "b2", "second"))
    assert (chosen(view, "first"), chosen(view, "second")) == ({"aa"}, {"bb", "b2"})


def test_a_request_does_not_move_to_another_model() -> None:
    before = eligibility(A, B).kv_groups("second").choose(None, random.Random())
    with pytest.raises(UnavailableError, match="no decode worker is available for model 'second'"):
        eligibility(A).kv_groups("second").choose(before, random.Random())


def test_a_model_without_live_workers_does_not_depend_on_the_others() -> None:
    """Where all workers of a model are suspect, Redis may be at fault; those of other models do not speak against it."""
    view = eligibility(A, replace(B, lease="suspect"))
    assert (chosen(view, "first"), chosen(view, "second")) == ({"aa"}, {"bb"})


def test_a_model_whose_workers_are_dead_is_missing_while_another_lives() -> None:
    view = eligibility(A, replace(B, lease="dead"))
    assert (view.missing_role(), view.missing_roles()) == (None, {"second": "decode"})
    with pytest.raises(UnavailableError):
        view.kv_groups("second").choose(None, random.Random())
    all_dead = eligibility(replace(A, lease="dead"), replace(B, lease="dead"))
    assert all_dead.missing_roles() == {}  # Redis may be at fault


def test_a_router_is_ready_while_it_can_serve_a_model() -> None:
    assert eligibility(A, B).missing_roles() == {}
    view = eligibility(A)
    assert (view.missing_role(), view.missing_roles()) == (None, {"second": "decode"})
    never = eligibility(A, B, worker("prefill", 2, "bb", "second"), mode="never")
    assert (never.missing_role(), never.missing_roles()) == (None, {"first": "prefill"})
    assert eligibility().missing_role() == "decode"


def test_one_model_has_the_workers_that_name_it_or_none() -> None:
    """Workers of a second model may come before the routers that serve it."""
    own = worker("decode", 2, "cc", "first")
    view = Eligibility([A, B, own], "fallback", models=("first",))
    assert chosen(view, "first") == chosen(view, "") == {"aa", "cc"}
    assert view.serves(own, "first") and not view.serves(B, "first") and not view.missing_roles()
    assert Eligibility([B], "fallback", models=("first",)).missing_role() == "decode"
    assert chosen(Eligibility([A, B], "fallback"), "") == {"aa", "bb"}


def test_models_share_no_prefixes() -> None:
    assert make_salt("aa") != make_salt("bb")


def test_each_model_has_its_own_cost_model() -> None:
    calibrations = Calibrations(MODELS)
    for _ in range(100):
        calibrations.of("second").observe_prefill(1000, 1000, 10.0)
    assert calibrations.of("second").known and calibrations.of("second").a > 5e-3
    assert not calibrations.of("first").known
    assert calibrations.of("") is calibrations.of("first") is calibrations.first


def test_a_worker_serves_one_model() -> None:
    view = eligibility(A, B)
    assert [view.serves(A, name) for name in MODELS] == [True, False]
    assert [view.serves(B, name) for name in MODELS] == [False, True]


def config(**settings: object) -> RouterConfig:
    second = FurtherModel(name="second", model=Path("/b"), aliases=("two",))
    return RouterConfig.model_validate({"model": "/m/first", "models": [second], **settings})


def test_a_surging_model_leaves_places_to_the_others() -> None:
    refused: list[str] = []
    admission = Admission(config(max_concurrent_requests=4), refused.append)
    with entered(admission, "first"), entered(admission, "first"):
        with (
            pytest.raises(OverloadedError, match="this model has 2 requests in flight"),
            entered(admission, "first"),
        ):
            pass
        with entered(admission, "second"), entered(admission, "second"):
            assert admission.in_model("first") == admission.in_model("second") == 2
    with entered(admission, "first"), entered(admission, "first"):
        pass
    assert admission.in_model("first") == admission.in_flight == 0


def test_the_only_model_has_every_place() -> None:
    admission = Admission(RouterConfig(model=Path("/m"), max_concurrent_requests=3), lambda tenant: None)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(entered(admission, "m"))
        with pytest.raises(OverloadedError), entered(admission, "m"):
            pass


def several(count: int, **settings: object) -> Admission:
    names = [chr(ord("b") + i) for i in range(count - 1)]
    models = [FurtherModel(name=name, model=Path("/m")) for name in names]
    made = RouterConfig.model_validate({"model": "/m/a", "models": models, **settings})
    return Admission(made, lambda tenant: None)


def test_two_surging_models_leave_places_to_a_third() -> None:
    """They had half of the places each, and the third one's requests were refused by the router's limit."""
    admission = several(3, max_concurrent_requests=8)
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(entered(admission, "a"))
        for _ in range(2):
            held.enter_context(entered(admission, "b"))
        said = (
            "the 2 requests in flight that are kept for it, and all models have the 2 that are kept for none"
        )
        with pytest.raises(OverloadedError, match=said) as caught, entered(admission, "b"):
            pass
        assert (caught.value.field, caught.value.limit) == ("model", "2")
        for _ in range(2):
            held.enter_context(entered(admission, "c"))
        assert [admission.in_model(name) for name in "abc"] == [4, 2, 2] and admission.in_flight == 8
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(entered(admission, "b"))
        with pytest.raises(OverloadedError, match="this model has 4 requests"), entered(admission, "b"):
            pass
    assert admission.in_flight == len(admission._tenants) == 0


@pytest.mark.parametrize(
    ("count", "limit"), [(3, 8), (3, 9), (4, 16), (5, 100), (7, 64), (4, 4), (3, 3), (3, 1)]
)
def test_every_model_has_its_part_whatever_the_others_take(count: int, limit: int) -> None:
    draw, admission = random.Random(count * limit), several(count, max_concurrent_requests=limit)
    names = [chr(ord("a") + i) for i in range(count)]
    part, half = (limit - max(1, limit // 2)) // (count - 1), max(1, limit // 2)
    held: dict[str, list[contextlib.ExitStack]] = {name: [] for name in names}
    for _ in range(600):
        name = draw.choice(names[: draw.choice((2, count))])
        if held[name] and draw.random() < 0.3:
            held[name].pop(draw.randrange(len(held[name]))).close()
            continue
        stack = contextlib.ExitStack()
        others = sum(map(len, held.values())) - len(held[name])
        try:
            stack.enter_context(entered(admission, name))
            held[name].append(stack)
        except OverloadedError:
            assert len(held[name]) >= part
            assert len(held[name]) >= half or others > 0, "one alone has half"
        assert len(held[name]) <= half
    for stack in (one for stacks in held.values() for one in stacks):
        stack.close()
    assert admission.in_flight == len(admission._tenants) == 0


def test_a_given_limit_of_a_model_holds_as_it_is() -> None:
    own = FurtherModel(name="b", model=Path("/m"), max_concurrent_requests=7)
    admission = several(3, max_concurrent_requests=8, models=(own, FurtherModel(name="c", model=Path("/m"))))
    with contextlib.ExitStack() as held:
        for _ in range(7):
            held.enter_context(entered(admission, "b"))
        with pytest.raises(OverloadedError, match="this model has 7 requests"), entered(admission, "b"):
            pass
    given = several(3, max_concurrent_requests=8, max_concurrent_requests_per_model=4)
    with contextlib.ExitStack() as held:
        for name in 4 * ["a"] + 4 * ["b"]:
            held.enter_context(entered(given, name))


def test_bodies_of_two_models_leave_a_third_its_part_of_the_budget() -> None:
    mib = 1 << 20
    admission = several(3, max_body_bytes=mib, max_body_bytes_in_flight=8 * mib)
    with contextlib.ExitStack() as held:

        def body(model: str) -> None:
            place = held.enter_context(admission.admit())
            place.of_model(model)
            place.body.grow_to(mib + FREE_BYTES)

        for model in 4 * "a" + 2 * "b":
            body(model)
        with pytest.raises(OverloadedError, match=f"the {2 * mib} bytes .* kept for it"):
            body("b")
        body("c")
        body("c")
        assert admission.bodies.held == 8 * mib
    assert admission.bodies.held == len(admission.bodies._tenants) == 0


def test_a_model_alone_has_room_for_the_longest_body() -> None:
    mib = 1 << 20
    admission = several(3, max_body_bytes=mib, max_body_bytes_in_flight=mib)
    with admission.admit() as place:
        place.of_model("b")
        place.body.grow_to(mib)


@contextlib.contextmanager
def entered(admission: Admission, model: str) -> Iterator[None]:
    with admission.admit() as place:
        place.of_model(model)
        yield


def test_the_names_of_models_differ() -> None:
    assert config().model_names == MODELS
    for wrong in ({"model_aliases": ["two"]}, {"served_model_name": "second"}, {"model_aliases": [""]}):
        with pytest.raises(ValueError, match="names two models, or is empty"):
            config(**wrong)
