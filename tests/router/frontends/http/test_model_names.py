"""Names of adapters beside those of several models: where they lead, and how they are listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from cluster.errors import (
    InvalidRequestError,
    UnavailableError,
    UnknownModelError,
)
from cluster.membership.types import WorkerInfo
from cluster.membership.wanted_adapters import Wanted
from cluster.security.keys import Caller
from router.frontends.http.adapters import AdapterCalls
from router.frontends.http.app import Views
from router.request.adapters import ModelAdapters
from router.request.served_model import NameWatch, further_models, listed
from tests.router.frontends.golden.stub_gateway import StubGateway, stub_of_two_models
from tests.router.request.adapter_workers import workers
from tests.router.stub_model import stub_model


@pytest.fixture(scope="module")
def gateway() -> Iterator[StubGateway]:
    with stub_of_two_models() as made:
        yield made


def test_an_adapter_leads_to_the_model_whose_workers_have_loaded_it(gateway: StubGateway) -> None:
    loaded = {"first": {"mine": "0" * 32, "both": "1" * 32}, "second": {"theirs": "2" * 32, "both": "3" * 32}}
    with_adapters = StubGateway(gateway.first.text, {"models": gateway.config.models})
    with_adapters.first = stub_model(
        with_adapters.config, gateway.first.text, adapters=lambda: loaded["first"]
    )
    texts = {"second": gateway.first.text}
    with_adapters.further = further_models(with_adapters.config, texts, lambda name: lambda: loaded[name])
    calls = AdapterCalls(cast(Any, with_adapters))
    for taken in ("mine", "theirs", "tiny", "second"):
        with pytest.raises(InvalidRequestError, match="served already"):
            calls._check_free(taken)
    calls._check_free("new")
    found = {name: with_adapters.model(name) for name in ("mine", "theirs", "both", "none")}
    assert {name: model.name for name, model in found.items()} == {
        "mine": "tiny",
        "theirs": "second",
        "both": "tiny",
        "none": "tiny",
    }
    assert found["theirs"].validator.limits.adapter_of("theirs") == "2" * 32
    with pytest.raises(UnknownModelError):
        found["mine"].validator.limits.check_model("theirs")


def test_adapters_without_workers_are_not_listed_and_keep_to_their_model_and_keys(
    gateway: StubGateway,
) -> None:
    text = gateway.first.text
    several = StubGateway(text, {"models": gateway.config.models})
    members = SimpleNamespace(all=[])
    eligibility = SimpleNamespace(serves=lambda worker, model: (worker.served_model or "tiny") == model)
    wanted = {
        "both": Wanted("d", "1"),
        "theirs": Wanted("d", "2", ("second",)),
        "mine": Wanted("d", "3", ("",)),
    }
    several.services = cast(
        Any,
        SimpleNamespace(
            members=members,
            placement=SimpleNamespace(eligibility=eligibility),
            wanted_adapters=SimpleNamespace(wanted=wanted),
        ),
    )
    several.first = stub_model(several.config, text, adapters=several._adapters_of("tiny"))
    several.further = further_models(several.config, {"second": text}, several._adapters_of)
    assert {name: several.model(name).name for name in wanted} == {
        "both": "tiny",
        "theirs": "second",
        "mine": "tiny",
    }
    for name in (*wanted, "no"):  # which may be of a worker's settings
        with pytest.raises(UnavailableError, match="no worker"):
            several.model(name).validator.limits.check_model(name)
    assert [one.names for one in several.models] == [[("tiny", "")], [("second", "")]]
    key = Caller("t", models=frozenset({"mine", "no"}))
    assert several._allowed(key, "mine") is several.first and several._allowed(key, "no") is None
    for name in ("theirs", "other", "tiny"):
        with pytest.raises(UnknownModelError, match="has no access"):
            several._allowed(key, name)
    members.all = workers(())
    with pytest.raises(UnknownModelError):
        several._allowed(key, "no")
    with pytest.raises(UnknownModelError):
        several.model("no").validator.limits.check_model("no")


def test_a_name_leads_to_the_model_whose_workers_have_the_adapter(gateway: StubGateway) -> None:
    """One that is only wanted took the name: 503 although another model's workers had it."""
    text = gateway.first.text
    loaded = {"tiny": {"x": ""}, "second": {"x": "1" * 32}}
    several = StubGateway(text, {"models": gateway.config.models})
    several.first = stub_model(several.config, text, adapters=lambda: loaded["tiny"])
    several.further = further_models(several.config, {"second": text}, lambda name: lambda: loaded[name])
    assert several.model("x").name == "second"
    loaded["second"] = {"x": ""}
    assert several.model("x").name == "tiny"


def test_a_name_stays_with_the_model_whose_workers_had_it(gateway: StubGateway) -> None:
    """Requests for it were answered with another model's weights while these restarted."""
    text, view = gateway.first.text, SimpleNamespace(workers=list[WorkerInfo]())
    several = StubGateway(text, {"models": gateway.config.models})

    def of(model: str) -> ModelAdapters:
        return ModelAdapters(lambda: view.workers, lambda one: one.served_model == model)

    several.first = stub_model(several.config, text, adapters=of("tiny"))
    several.further = further_models(several.config, {"second": text}, of)
    own, other = workers((("x", "0" * 32),), (("x", "1" * 32), ("y", "1" * 32)))
    own, other = replace(own, served_model="tiny"), replace(other, served_model="second")
    view.workers = [other]
    assert several.model("x").name == "second", "no other has had it"
    view.workers = [own, other]
    assert several.model("x").name == "tiny"
    view.workers = [other]
    assert several.model("x").name == "tiny"
    with pytest.raises(UnavailableError):
        several.model("x").validator.limits.check_model("x")
    assert [name for _, name, _ in listed(several.models)] == ["tiny", "second", "y"]
    calls = AdapterCalls(cast(Any, several))
    with pytest.raises(InvalidRequestError, match="served already"):
        calls._check_free("x")
    view.workers = [replace(own, adapters=()), other]  # it was taken from its settings
    assert several.model("x").name == "second"


def test_a_name_of_two_adapters_or_of_a_model_is_listed_once_and_logged_once(
    gateway: StubGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers' settings may name adapters so; the list says to which of them a name leads."""
    text, one, two = gateway.first.text, "1" * 32, "2" * 32
    loaded = {"tiny": {"both": one, "two": one}, "second": {"both": two, "own": two, "tiny": two}}
    several = StubGateway(text, {"models": gateway.config.models})
    several.first = stub_model(several.config, text, adapters=lambda: loaded["tiny"])
    several.further = further_models(several.config, {"second": text}, lambda name: lambda: loaded[name])
    assert [(name, parent) for _, name, parent in listed(several.models)] == [
        *(("tiny", ""), ("both", "tiny")),
        *(("second", ""), ("own", "second")),
    ]
    assert [several.model(name).name for name in ("both", "two", "tiny", "own")] == [
        *("tiny", "second", "tiny", "second"),
    ]
    views = Views.__new__(Views)
    views._gateway, views._encoded_models = several, None
    assert [shown["id"] for shown in orjson.loads(views._all()[1])["data"]] == [
        "tiny",
        "both",
        "second",
        "own",
    ]
    watch = NameWatch()
    for _ in range(2):
        watch.look(several.models)
    loaded["second"] = {**loaded["second"], "more": two}
    watch.look(several.models)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "adapter two of tiny gets no requests: its name is the name or an alias of a model",
        "adapter both of second gets no requests: its name is that of an adapter of 'tiny'",
        "adapter tiny of second gets no requests: its name is the name or an alias of a model",
    ]
