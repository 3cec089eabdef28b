"""A request's model may be the name of an adapter that workers have loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError, UnavailableError, UnknownModelError
from cluster.membership.types import WorkerInfo
from cluster.membership.wanted_adapters import Wanted
from cluster.protocol.block_hash import make_salt
from router.dispatch.exclusions import WithoutAdapter, exclusions
from router.dispatch.services import Services
from router.frontends.http.adapters import AdapterCalls
from router.placement.kv_groups import kv_group_of
from router.placement.types import Reason
from router.request.adapters import KnownNames, ModelAdapters, NoWorkers, digests
from router.request.completion import Completion
from router.request.options import GenerationOptions
from router.request.resume_tickets import Tickets
from router.request.validator import Envelope, Validator
from tests.router.request.adapter_workers import workers

OLD, NEW = "0" * 32, "1" * 32


def completion(model: str, known: Mapping[str, str]) -> Completion:
    text: Any = SimpleNamespace(vocab_size=100, max_position_embeddings=64, generation={}, has_head=True)
    config = RouterConfig(model="base", secret="x" * 16)  # type: ignore[arg-type]
    validator = Validator(config, text, lambda: known)
    validator.limits.check_model(model)
    return validator.completion([1], GenerationOptions(seed=1), Envelope("r", model))


def test_the_name_gives_model_and_digest():
    made = completion("tuned", {"tuned": OLD})
    assert (made.model, made.served_model, made.adapter) == ("tuned", "base", OLD)
    for name in ("", "base"):
        made = completion(name, {"tuned": OLD, "base": NEW})
        assert (made.model, made.adapter) == ("base", "")
    with pytest.raises(UnknownModelError):
        completion("other", {"tuned": OLD})


def test_most_ready_workers_decide_what_a_name_means():
    some = workers((("a", OLD),), (("a", NEW), ("b", OLD)), (("a", NEW),))
    assert digests(some) == {"a": NEW, "b": OLD}
    drained = [replace(one, state="draining") for one in some[1:]]
    assert digests([some[0], *drained]) == {"a": OLD}
    one_role = [replace(one, role="prefill") for one in workers(*[(("a", NEW),)] * 2)]
    first, second = workers(*[(("a", OLD),)] * 2)
    both = [replace(first, role="prefill"), replace(second, role="decode")]
    assert digests([*one_role, both[0], *one_role, both[1]]) == {"a": OLD}
    assert digests([replace(one, lease="dead") for one in some[1:]] + some[:1]) == {"a": OLD, "b": OLD}
    # Which may prefill: no pair of workers has the same one
    for digest, other in ((OLD, NEW), (NEW, OLD)):
        decode = replace(workers((("a", digest),))[0], role="decode")
        assert digests([decode, *workers(*[(("a", other),)] * 3)]) == {"a": digest}
    view = [some]
    loaded = ModelAdapters(lambda: view[0])
    assert loaded() is loaded()
    view[0] = some[:1]
    assert loaded() == {"a": OLD}
    assert ModelAdapters(lambda: some, lambda worker: worker.worker_id == "w2")() == {"a": NEW}


class Deployment:
    """What a model's router sees."""

    def __init__(self, *adapters: tuple[tuple[str, str], ...]):
        self.workers = workers(*adapters)
        self.wanted: Mapping[str, Wanted] = {}
        self.loaded = ModelAdapters(
            lambda: self.workers,
            lambda one: one.served_model == "",
            lambda: self.wanted,
            lambda one: one.is_for("m"),
        )

    def change(self, **changes: Any) -> None:
        self.workers = [replace(one, **changes) for one in self.workers]

    def refused(self, name: str) -> type[Exception] | None:
        found: UnavailableError | UnknownModelError | None = None
        try:
            completion(name, self.loaded())
        except (UnavailableError, UnknownModelError) as error:
            found = error
        if found is None:
            return None
        assert found.field == "model"
        assert (found.retry_after_seconds > 0) == isinstance(found, UnavailableError)
        return type(found)


def test_a_wanted_adapter_that_no_worker_has_is_unavailable():
    """Its workers have restarted, and have not read it yet; for clients it comes back, as its model does."""
    seen = Deployment((("a", OLD),))
    seen.wanted = {"a": Wanted("d", "1"), "b": Wanted("d", "2", ("m",)), "c": Wanted("d", "3", ("other",))}
    assert [seen.refused(name) for name in "abc"] == [None, UnavailableError, UnknownModelError]
    seen.change(adapters=(), epoch=8)
    assert [seen.refused(name) for name in "abc"] == [UnavailableError, UnavailableError, UnknownModelError]
    seen.wanted = {}  # by a call
    assert seen.refused("a") == UnknownModelError


@pytest.mark.parametrize("gone", ["draining", "left"])
def test_without_workers_any_name_may_come_back(gone):
    seen = Deployment((("a", OLD),))
    assert [seen.refused(name) for name in ("", "a", "b")] == [None, None, UnknownModelError]
    seen.workers = [replace(one, state="draining") for one in seen.workers if gone == "draining"]
    assert [seen.refused(name) for name in ("", "base", "a", "b")] == [
        *(None, None),  # placement waits for a worker
        *(UnavailableError, UnavailableError),
    ]
    assert isinstance(seen.loaded(), NoWorkers) and seen.loaded() == {"a": ""}


def test_a_model_without_workers_keeps_the_names_of_its_adapters():
    """Beside another one that has some, and no other names: nothing may ever come of those."""
    seen = Deployment((("a", OLD),))
    assert seen.loaded() == {"a": OLD}
    seen.change(served_model="other", adapters=())
    assert [seen.refused(name) for name in "ab"] == [UnavailableError, UnknownModelError]
    seen.change(served_model="")
    assert seen.refused("a") == UnknownModelError


def test_a_load_that_gave_workers_different_files_is_no_success():
    def check(*digests: str) -> None:
        members = SimpleNamespace(all=workers(*((("a", one),) for one in digests), ()))
        placement = SimpleNamespace(eligibility=SimpleNamespace(serves=lambda worker, model: True))
        services = SimpleNamespace(members=members, placement=placement)
        gateway: Any = SimpleNamespace(services=services, config=SimpleNamespace(served_name="m"))
        AdapterCalls(gateway)._check_one_digest("m", "a")

    check(OLD, OLD)
    with pytest.raises(UnavailableError, match="2 different"):
        check(OLD, NEW)


def test_workers_without_the_adapter_are_excluded_by_name():
    view = [workers((("a", OLD),), (), (("a", NEW),))]
    lacking = WithoutAdapter(lambda: view[0])
    assert exclusions((), {}, (), lacking("m", OLD)) == {"w1": Reason.ADAPTER, "w2": Reason.ADAPTER}
    assert lacking("m", OLD) is lacking("m", OLD), "once per version of the membership"
    assert not lacking("another model", OLD)
    view[0] = workers((), (("a", OLD), ("b", NEW)), (("a", OLD), ("b", NEW)))
    assert [*lacking("m", OLD)] == ["w0"] == [*lacking("m", NEW)]


def test_where_no_worker_is_registered_with_an_adapter_those_that_say_so_are_excluded() -> None:
    """It was unloaded, and stays in some slots for requests that began before. All were excluded, so none was: a retry
    asked the same worker again and again, which lacked it, and never another one."""
    having, lacking_p = workers((("a", OLD),), ())
    having_d, lacking_d = (
        replace(one, worker_id=f"d{one.worker_id}", role="decode") for one in (having, lacking_p)
    )
    view: list[list[WorkerInfo]] = [[]]
    without = WithoutAdapter(lambda: view[0])
    for seen, expected in (
        ([having, lacking_p, having_d, lacking_d], {"w1", "dw1"}),
        ([lacking_p, having_d, lacking_d], {"w1", "dw1"}),  # decode workers prefill
        ([having, lacking_p, lacking_d], {"w1"}),
        ([lacking_p, lacking_d], set()),
        ([lacking_p, lacking_d, replace(having_d, lease="dead")], set()),
        ([lacking_p, lacking_d, replace(having_d, state="draining")], set()),
        ([replace(one, lease="dead") for one in (having_d, lacking_d)], {"dw1"}),
    ):
        view[0] = seen
        assert {*without("m", OLD)} == expected, seen


def test_a_missing_adapter_is_the_reason_before_others() -> None:
    """No wait removes it, as it does for a worker that is full or silent (Eligibility.usable)."""
    attempts = {"a": Reason.REFUSED, "b": Reason.REFUSED}
    found = exclusions(["a"], attempts, [], ["a", "c"])
    assert found == {"a": Reason.ADAPTER, "b": Reason.REFUSED, "c": Reason.ADAPTER}


def test_a_dead_worker_keeps_no_name_alive() -> None:
    """It stays registered for minutes: an adapter that was unloaded meanwhile was listed and 503, and not to be loaded
    again. Where all are dead, which may be Redis's fault, requests wait for them as those for the model do."""
    seen = Deployment((("a", OLD),), (("b", NEW),))
    seen.workers[0] = replace(seen.workers[0], lease="dead")
    assert [seen.refused(name) for name in "ab"] == [UnknownModelError, None]
    assert seen.loaded() == {"b": NEW}
    seen.change(lease="dead")
    assert seen.loaded() == {"a": OLD, "b": NEW}
    seen.wanted = {"b": Wanted("d", "1")}
    assert seen.loaded() == {"a": OLD, "b": NEW}
    seen.wanted = {}
    assert seen.loaded() == {"a": OLD}
    assert [seen.refused(name) for name in "ab"] == [None, UnknownModelError]


@pytest.mark.parametrize("called", [True, False])
def test_names_stay_with_the_model_whose_workers_had_them(called: bool) -> None:
    seen = Deployment((("a", OLD),))
    calls = {"a": Wanted("d", "1")} if called else {}
    seen.wanted = {"b": Wanted("d", "2"), **calls}

    def kept() -> set[str]:
        found = seen.loaded()
        assert isinstance(found, KnownNames)
        return {*found.kept}

    assert kept() == {"a"}, "b was never there"
    seen.change(served_model="other")
    assert kept() == {"a"}
    seen.workers = []
    assert kept() == {"a"}
    seen.workers = workers(())  # they are back, and have not read it yet
    assert kept() == ({"a"} if called else set())
    seen.wanted = {"b": Wanted("d", "2")}
    assert kept() == set()


def test_what_was_unloaded_while_its_model_had_no_workers_is_unknown():
    """It was 503, with the advice to come back, until a worker registered."""
    view: Any = SimpleNamespace(
        workers=workers((("called", OLD), ("set", NEW))), wanted={"called": Wanted("d", "1")}
    )
    loaded = ModelAdapters(lambda: view.workers, wanted=lambda: view.wanted)
    assert loaded() == {"called": OLD, "set": NEW}
    view.workers = []
    assert loaded() == {"called": "", "set": ""}
    view.wanted = {}
    assert loaded() == {"set": ""}
    view.workers = workers((("called", OLD), ("set", NEW)))  # they have not unloaded it yet
    assert loaded() == {"called": OLD, "set": NEW}


def test_salts_differ_by_digest():
    services: Any = SimpleNamespace(_salts={})
    salts = [Services.salt(services, "m", "tenant", adapter) for adapter in ("", OLD, NEW)]
    assert len(set(salts)) == 3
    assert salts == [make_salt("m", adapter, "tenant") for adapter in ("", OLD, NEW)]
    assert salts == [Services.salt(services, "m", "tenant", adapter) for adapter in ("", OLD, NEW)]


def test_a_ticket_is_for_one_adapter():
    """Reloaded under its name with other weights: the rest of the answer would be another model's."""
    tickets = Tickets("secret", 600.0)
    first = completion("tuned", {"tuned": OLD})
    ticket = tickets.issue(first, b"n" * 16)
    again = replace(first, resume_ticket=ticket, resume_tokens=[5])
    assert tickets.check(again, b"n" * 16)
    with pytest.raises(InvalidRequestError, match="resume_ticket"):
        tickets.check(replace(again, adapter=NEW), b"n" * 16)


def test_kv_groups_without_the_adapter_are_named_while_another_one_has_it() -> None:
    """In a roll each request first went to either group, and back from the one whose workers had not loaded it yet."""
    old, new, prefill = workers((("a", OLD),), (), (("a", OLD),))
    old, new = replace(old, role="decode"), replace(new, role="decode", model_id="n")
    view = [[old, new, replace(prefill, model_id="n")]]
    without = WithoutAdapter(lambda: view[0])
    assert without.kv_groups(OLD) == {kv_group_of(new)} and without.kv_groups(OLD) is without.kv_groups(OLD)
    assert without.kv_groups(NEW) == set()
    view[0] = [old, replace(new, adapters=(("b", OLD),))]
    assert without.kv_groups(OLD) == set()
    view[0] = [replace(old, state="draining"), new]
    assert without.kv_groups(OLD) == set(), "none has it"


def test_a_name_of_a_call_may_be_that_of_a_setting_later():
    """Then it stays while its model has no workers."""
    view: Any = SimpleNamespace(workers=workers((("a", OLD),)), wanted={"a": Wanted("d", "1")})
    loaded = ModelAdapters(lambda: view.workers, wanted=lambda: view.wanted)
    assert loaded() == {"a": OLD}
    view.workers, view.wanted = workers(()), {}
    assert loaded() == {}
    view.workers = workers((("a", NEW),))
    assert loaded() == {"a": NEW}
    view.workers = []
    assert loaded() == {"a": ""}
