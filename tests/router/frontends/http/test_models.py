"""Several models behind one HTTP endpoint: names, aliases and lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.errors import UnknownModelError
from router.frontends.http.app import Views
from router.request.served_model import further_models
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway
from tests.router.stub_model import stub_model


@pytest.fixture(scope="module")
def gateway() -> Iterator[StubGateway]:
    text = ModelText(DEMO)
    second = {"name": "second", "model": DEMO, "aliases": ["two"], "max_model_len": 33}
    made = StubGateway(text, {"models": [second], "model_aliases": ["one"]})
    made.further = further_models(made.config, {"second": text})
    yield made
    text.close()


def test_names_and_aliases_lead_to_a_model(gateway: StubGateway) -> None:
    found = {name: gateway.model(name).name for name in ("", "tiny", "one", "second", "two")}
    assert found == {"": "tiny", "tiny": "tiny", "one": "tiny", "second": "second", "two": "second"}
    for name in found:
        gateway.model(name).validator.limits.check_model(name)
    with pytest.raises(UnknownModelError, match="'no' is not served here; 'tiny', 'second' are"):
        gateway.model("no").validator.limits.check_model("no")
    anything: Any = ["second"]
    assert gateway.model(anything).name == "tiny"  # its type is refused when the request is read


def test_each_model_has_its_own_limits(gateway: StubGateway) -> None:
    assert gateway.model("two").validator.limits.max_model_len == 33
    assert gateway.model("").validator.limits.max_model_len > 33


async def test_all_models_are_listed(gateway: StubGateway) -> None:
    views, asked = Views(gateway), lambda name: type("Asked", (), {"path_params": {"model": name}})()
    listed = (await views.models(asked(""))).body
    assert b'"id":"tiny"' in listed and b'"id":"second"' in listed and b'"aliases":["two"]' in listed
    assert b'"id":"second"' in (await views.model(asked("two"))).body
    with pytest.raises(UnknownModelError):
        await views.model(asked("no"))


def test_an_adapter_leads_to_the_model_whose_workers_have_loaded_it(gateway: StubGateway) -> None:
    loaded = {"first": {"mine": "0" * 32, "both": "1" * 32}, "second": {"theirs": "2" * 32, "both": "3" * 32}}
    with_adapters = StubGateway(gateway.first.text, {"models": gateway.config.models})
    with_adapters.first = stub_model(
        with_adapters.config, gateway.first.text, adapters=lambda: loaded["first"]
    )
    texts = {"second": gateway.first.text}
    with_adapters.further = further_models(with_adapters.config, texts, lambda name: lambda: loaded[name])
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
