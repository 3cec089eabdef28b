"""Calls that load and unload adapters at a router of several models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from cluster.errors import (
    AdapterRefusedError,
    DeadlineError,
    InvalidRequestError,
    ModelError,
    UnavailableError,
    UnknownModelError,
)
from cluster.membership.adapter_refusals import MOST, Refusal, decode, encode
from cluster.membership.status import WorkerStatus
from cluster.membership.types import Lease, WorkerInfo
from cluster.membership.wanted_adapters import Wanted
from cluster.protocol.times import REFRESH_SECONDS
from router.frontends.http.adapters import LOAD, SPREAD_SECONDS, UNLOAD, AdapterCalls
from router.frontends.http.openapi.document import build_document
from router.request.adapters import ModelAdapters
from router.request.served_model import further_models
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway
from tests.router.request.adapter_workers import workers
from tests.router.stub_model import stub_model

DIGEST = "1" * 32


class Cluster:
    """Two models, "tiny" and "second", with a worker each, which load at once what is for them."""

    def __init__(self, text: ModelText, *, several: bool = True):
        second = {"name": "second", "model": DEMO, "aliases": ["two"]}
        self.gateway: Any = StubGateway(text, {"models": [second] if several else []})
        self.entries: dict[str, Wanted] = {}
        self.wanted: dict[str, Wanted] = {}  # the same, another object with each change
        self.served = ("", "second")
        self.statuses: dict[str, WorkerStatus] = {}  # by the workers' served_model
        self.gone: set[str] = set()  # served_model of workers that have left
        self.leases: dict[str, Lease] = {}  # by served_model
        self.loads = True
        members = SimpleNamespace(all=[], refresh_status=self.refresh_status)
        self.members = members
        services: Any = SimpleNamespace(
            members=members,
            placement=SimpleNamespace(eligibility=SimpleNamespace(serves=self._serves)),
            wanted_adapters=self,
        )
        self.gateway.services = services

        def of(model: str) -> ModelAdapters:
            return ModelAdapters(
                lambda: members.all,
                lambda one: self._serves(one, model),
                lambda: self.wanted,
                lambda one: any(map(one.is_for, ("tiny", "") if model == "tiny" else (model,))),
            )

        self.gateway.first = stub_model(self.gateway.config, text, adapters=of("tiny"))
        self.gateway.further = further_models(self.gateway.config, {"second": text}, of)
        self.follow()

    def _serves(self, worker: WorkerInfo, model: str) -> bool:
        return (worker.served_model or "tiny") == model

    async def refresh_status(self) -> None:
        self.follow()

    def follow(self) -> None:
        self.wanted = dict(self.entries)
        entries = self.entries if self.loads else {}
        pairs = [
            tuple((name, DIGEST) for name, one in entries.items() if one.is_for(served))
            for served in self.served
        ]
        self.members.all = [
            replace(
                one,
                served_model=served,
                status=self.statuses.get(served, WorkerStatus()),
                lease=self.leases.get(served, "live"),
            )
            for one, served in zip(workers(*pairs), self.served, strict=True)
            if served not in self.gone
        ]

    async def add(self, name: str, path: str, serving: Sequence[str] = ()) -> Wanted:
        self.entries[name] = Wanted(path, "tag", tuple(serving))
        self.follow()
        return self.entries[name]

    async def find(self, name: str) -> Wanted | None:
        return self.entries.get(name)

    async def remove(self, name: str, entry: Wanted | None) -> bool:
        found = self.entries.get(name)
        if found is None or entry not in (None, found):
            return False
        del self.entries[name]
        self.follow()
        return True

    @property
    def loaded(self) -> dict[str, list[str]]:
        return {one.served_model: [name for name, _ in one.adapters] for one in self.members.all}

    async def call(self, what: str, **body: Any) -> Any:
        async def stream() -> AsyncIterator[bytes]:
            yield orjson.dumps(body)

        request: Any = SimpleNamespace(stream=stream)
        return orjson.loads((await getattr(AdapterCalls(self.gateway), what)(request)).body)


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    made = ModelText(DEMO)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the wrong workers fails at once."""
    monkeypatch.setattr("router.frontends.http.adapters.WAIT_SECONDS", -1.0)
    monkeypatch.setattr("router.frontends.http.adapters.SPREAD_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("model", "loaded"),
    [
        ("tiny", {"": ["a"], "second": []}),
        ("second", {"": [], "second": ["a"]}),
        ("two", {"": [], "second": ["a"]}),
    ],
)
async def test_the_workers_of_the_model_that_is_named_load_it(text, model, loaded):
    cluster = Cluster(text)
    answer = await cluster.call("load", lora_name="a", lora_path="p", model=model)
    assert answer == {"id": "a", "digest": DIGEST}
    assert cluster.loaded == loaded
    for named in ("tiny", "second"):  # a name is of one adapter, whatever its model
        with pytest.raises(InvalidRequestError, match="served already"):
            await cluster.call("load", lora_name="a", lora_path="p", model=named)
    assert await cluster.call("unload", lora_name="a") == {"id": "a"}
    assert cluster.loaded == {"": [], "second": []}


async def test_what_vllms_clients_write_out_changes_nothing(text):
    """Other values and other fields are refused by their names."""
    cluster, load = Cluster(text), {"lora_name": "a", "lora_path": "p", "model": "tiny"}
    for wrong in ({"load_inplace": True}, {"lora_int_id": "1"}, {"more": 1}):
        with pytest.raises(InvalidRequestError, match="is not a field") as caught:
            await cluster.call("load", **load, **wrong)
        assert caught.value.field == next(iter(wrong)) and not cluster.entries
    await cluster.call("load", **load, load_inplace=False, lora_int_id=None)
    assert await cluster.call("unload", lora_name="a", lora_int_id=1, model=None) == {"id": "a"}


async def test_a_worker_without_lora_dir_refuses_at_once(text):
    """Also where the other model's workers have one; nothing is asked of them."""
    cluster = Cluster(text)
    cluster.statuses = {"": WorkerStatus(takes_adapters=1), "second": WorkerStatus(takes_adapters=0)}
    with pytest.raises(AdapterRefusedError, match="is started without it") as caught:
        await cluster.call("load", lora_name="a", lora_path="p", model="second")
    assert caught.value.message.startswith("lora_dir: worker ")
    assert (caught.value.field, caught.value.http_status) == ("lora_dir", 409) and not cluster.entries
    await cluster.call("load", lora_name="a", lora_path="p", model="tiny")


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (Refusal("tag", "all 2 slots (max_loras) are taken", "max_loras"), AdapterRefusedError),
        (Refusal("tag", "requests still use those", "max_loras", final=False), DeadlineError),
        (Refusal("of an entry before", "is missing", "lora_dir"), DeadlineError),
    ],
)
async def test_what_a_worker_refuses_ends_the_call(text, refusal, raised):
    """With its setting's name, and no worker tries again; unless it waits itself, or was asked for another entry."""
    cluster = Cluster(text)
    cluster.loads = False
    cluster.statuses = {"": WorkerStatus(takes_adapters=1, adapters_refused=encode({"a": refusal}))}
    with pytest.raises(raised) as caught:
        await cluster.call("load", lora_name="a", lora_path="p", model="tiny")
    if raised is AdapterRefusedError:
        assert caught.value.field == "max_loras" and "max_loras" in caught.value.message
    assert ("a" in cluster.entries) == (raised is DeadlineError)


def test_the_longest_refusals_are_read():
    """Texts of files, which may be of characters that JSON writes as twelve."""
    error = ModelError("\U0001f600" * 1000, field="\U0001f600" * 1000)
    given = {f"{i:x<128}": Refusal.of("t" * 32, error) for i in range(MOST)}
    assert decode(encode(given)) == given


def test_refusals_of_other_versions_are_left_out():
    given = {
        "x" * 40: Refusal("t", "ä" * 400, "f", False),
        **{f"n{i}": Refusal("t", "m") for i in range(MOST)},
    }
    assert decode(encode(given)) == dict([*given.items()][-MOST:])
    assert encode({}) is None
    for text in (
        None,
        "a: is missing; b: all slots",
        "[1]",
        '{"a": 1}',
        '{"a": {"tag": 1}}',
        "[" * 10_000,
        "{" * 70_000,
    ):
        assert decode(text) == {}


async def test_loading_at_a_router_of_several_models_names_one(text):
    cluster = Cluster(text)
    for body in ({}, {"model": None}):
        with pytest.raises(InvalidRequestError, match="'tiny', 'second'") as caught:
            await cluster.call("load", lora_name="a", lora_path="p", **body)
        assert caught.value.field == "model" and not cluster.entries
    for unknown in ("", "no", "x" * 10_000):
        with pytest.raises(UnknownModelError, match="'tiny', 'second' are") as caught:
            await cluster.call("load", lora_name="a", lora_path="p", model=unknown)
        assert caught.value.field == "model" and len(caught.value.message) < 200
    await cluster.call("load", lora_name="a", lora_path="p", model="second")
    with pytest.raises(
        UnknownModelError, match="model: 'a' is not served"
    ):  # an adapter's name is no model's
        await cluster.call("load", lora_name="b", lora_path="p", model="a")


async def test_an_adapter_of_another_model_is_not_unloaded(text):
    cluster = Cluster(text)
    await cluster.call("load", lora_name="a", lora_path="p", model="second")
    with pytest.raises(UnknownModelError, match="no adapter of 'tiny'"):
        await cluster.call("unload", lora_name="a", model="tiny")
    assert cluster.loaded == {"": [], "second": ["a"]}
    assert await cluster.call("unload", lora_name="a", model="two") == {"id": "a"}


async def test_another_routers_adapter_is_unloaded_without_waiting_for_workers(text):
    cluster = Cluster(text)
    await cluster.add("a", "p", ("third",))
    assert await cluster.call("unload", lora_name="a") == {"id": "a"}
    assert not cluster.entries


async def test_a_router_of_one_model_needs_no_name(text):
    """Workers of a second one, which routers do not have yet, load nothing: requests would be answered with its weights
    once the first one's workers are away."""
    cluster = Cluster(text, several=False)
    await cluster.call("load", lora_name="a", lora_path="p")
    await cluster.call("load", lora_name="b", lora_path="p", model="tiny")
    assert cluster.loaded == {"": ["a", "b"], "second": []}
    assert all(one.is_for("tiny") for one in cluster.entries.values()), "they may also name it"
    assert await cluster.call("unload", lora_name="a", model="tiny") == {"id": "a"}


@pytest.mark.parametrize("again", [False, True])
async def test_a_load_ends_when_its_adapter_changes_between_two_looks(text, monkeypatch, again):
    """It answered with the digest of what the other call has loaded since, or waited for its whole time."""
    monkeypatch.setattr("router.frontends.http.adapters.WAIT_SECONDS", 30.0)
    monkeypatch.setattr("router.frontends.http.adapters.POLL_SECONDS", 0.0)
    cluster = Cluster(text)
    cluster.loads = False
    follow = cluster.follow

    def changed_between_two_looks() -> None:
        if "a" in cluster.entries:
            del cluster.entries["a"]
            if again:
                cluster.entries["a"] = Wanted("other", "later", ("tiny", ""))
                cluster.loads = True
            cluster.follow = follow  # type: ignore[method-assign]
        follow()

    cluster.follow = changed_between_two_looks  # type: ignore[method-assign]
    monkeypatch.setattr(cluster, "add", partial(added_unseen, cluster, follow))
    with pytest.raises(AdapterRefusedError, match="another call has unloaded 'a'") as caught:
        await cluster.call("load", lora_name="a", lora_path="p", model="tiny")
    assert caught.value.field == "lora_name"
    assert [one.tag for one in cluster.entries.values()] == ["later"] * again, "the other call's stays"


async def added_unseen(
    cluster: Cluster, follow: Any, name: str, path: str, serving: Sequence[str] = ()
) -> Wanted:
    """Wanted, and the workers have not looked yet."""
    cluster.entries[name] = Wanted(path, "tag", tuple(serving))
    follow()
    return cluster.entries[name]


@pytest.mark.parametrize("what", ["load", "unload"])
async def test_routers_have_time_to_see_what_a_call_has_changed(text, monkeypatch, what):
    """The client's next request, at another router or process, was answered with 404."""
    cluster = Cluster(text)
    await cluster.add("b", "p", ("tiny", ""))
    monkeypatch.setattr("router.frontends.http.adapters.SPREAD_SECONDS", 0.2)
    body = {"lora_name": "a", "lora_path": "p", "model": "tiny"} if what == "load" else {"lora_name": "b"}
    began = time.monotonic()
    await cluster.call(what, **body)
    assert time.monotonic() - began >= 0.2
    assert SPREAD_SECONDS >= 2 * REFRESH_SECONDS


@pytest.mark.parametrize("several", [True, False])
async def test_nothing_stays_in_force_of_a_load_without_workers(text, several):
    """The next call would find its name taken, and workers that come later would load what was answered with 503."""
    cluster = Cluster(text, several=several)
    cluster.gone = {"second"} if several else {*cluster.served}
    named = {"model": "second"} if several else {}
    for _ in range(2):
        with pytest.raises(UnavailableError, match="is available to load it") as caught:
            await cluster.call("load", lora_name="a", lora_path="p", **named)
        assert caught.value.retry_after_seconds > 0 and not cluster.entries


@pytest.mark.parametrize("lease", [None, "dead"])
async def test_an_unload_waits_for_no_workers_that_are_gone(text, lease):
    cluster = Cluster(text)
    await cluster.call("load", lora_name="a", lora_path="p", model="second")
    cluster.gone, cluster.leases = ({"second"}, {}) if lease is None else (set(), {"second": lease})
    assert await cluster.call("unload", lora_name="a") == {"id": "a"}
    assert not cluster.entries


async def test_an_unload_waits_for_a_worker_that_may_come_back(text):
    cluster = Cluster(text)
    await cluster.call("load", lora_name="a", lora_path="p", model="second")
    cluster.leases = {"second": "suspect"}
    cluster.follow()
    cluster.follow = lambda: None  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match="0 of 1 workers have given up 'a'"):
        await cluster.call("unload", lora_name="a")


@pytest.mark.parametrize("later", [None, Wanted("q", "later")])
async def test_a_load_ends_once_another_call_has_unloaded_its_adapter(text, later):
    """Also where a later call has loaded another one under its name, whose digest would be the answer."""
    cluster = Cluster(text)
    add, after = cluster.add, {} if later is None else {"a": later}

    async def added_and_unloaded(name: str, path: str, serving: Sequence[str] = ()) -> Wanted:
        added = await add(name, path, serving)
        cluster.entries = {**after}
        cluster.follow()
        return added

    cluster.add = added_and_unloaded  # type: ignore[method-assign]
    with pytest.raises(AdapterRefusedError, match="another call has unloaded 'a'") as caught:
        await cluster.call("load", lora_name="a", lora_path="p", model="tiny")
    assert caught.value.field == "lora_name" and cluster.entries == after


async def test_an_unload_does_not_wait_for_what_another_call_loads_under_its_name(text):
    cluster = Cluster(text)
    await cluster.call("load", lora_name="a", lora_path="p", model="tiny")
    remove = cluster.remove

    async def removed_and_loaded(name: str, entry: Wanted | None) -> bool:
        removed = await remove(name, entry)
        await cluster.add(name, "q")
        return removed

    cluster.remove = removed_and_loaded  # type: ignore[method-assign]
    assert await cluster.call("unload", lora_name="a") == {"id": "a"}
    assert [*cluster.entries] == ["a"]


def test_the_document_has_the_status_of_each_refusal(text):
    common = {InvalidRequestError, UnknownModelError, UnavailableError, DeadlineError}
    paths = build_document(Cluster(text).gateway)["paths"]
    for path, errors in {LOAD: {*common, AdapterRefusedError}, UNLOAD: common}.items():
        stated = paths[path]["post"]["responses"].keys()
        assert {str(one.http_status) for one in errors} <= stated
        assert ("409" in stated) == (AdapterRefusedError in errors)


async def test_a_load_of_different_files_is_no_success(text, monkeypatch):
    def differ(calls, model, name):
        raise UnavailableError("2 different adapters", field="lora_path")

    monkeypatch.setattr(AdapterCalls, "_check_one_digest", differ)
    with pytest.raises(UnavailableError, match="2 different"):
        await Cluster(text).call("load", lora_name="a", lora_path="p", model="tiny")
