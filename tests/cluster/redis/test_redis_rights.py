"""What components declare is what their scripts call, and a user that lacks some of it is told so."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import redis

from baton.autoscaler import leader
from baton.autoscaler.rights import rights as of_autoscaler
from baton.cli.serve import report_redis
from baton.doctor.redis_check import RIGHTS, check_redis, check_rights, check_server
from cluster.index.scripts import claim, report
from cluster.membership import known_adapters, scripts
from cluster.membership.reader import look_at_workers, read_workers
from cluster.redis.connect import connect
from cluster.redis.embedded import EmbeddedRedis
from cluster.redis.rights import Rights, RightsWatch, lacking, too_few_rights
from deploy import redis_users
from router.placement.place_script import script_source as place_source
from router.placement.prefix_index import match_source, record_source
from router.placement.settlement import settle_source
from router.quota.scripts import script_source
from router.rights import index_rights as of_routers_index
from router.rights import rights as of_router
from tests.baton.autoscaler.registered import RegisteredWorker
from worker.rights import index_rights as of_workers_index
from worker.rights import rights as of_worker

REGISTRY = (scripts.REGISTER, scripts.RENEW, scripts.LEAVE, scripts.DRAIN, scripts.READ)
EXCHANGE = resources.files("router.observe.live").joinpath("exchange.lua").read_text()
QUOTAS = (script_source("charge.lua"), script_source("settle.lua"))
USED = [
    (of_worker, (*REGISTRY, scripts.LOOK, scripts.NAMED, report(), known_adapters.RESTORE)),
    (
        of_router,
        (
            *(scripts.READ, scripts.LOOK, scripts.NAMED, scripts.DRAIN),
            *(place_source(), settle_source(), EXCHANGE, *QUOTAS),
            *(known_adapters.ADD, known_adapters.REMOVE, known_adapters.RESTORE),
        ),
    ),
    (of_autoscaler, (leader._HOLD, leader._GIVE_UP)),
    (of_workers_index, (report(), claim())),
    (of_routers_index, (match_source(), record_source())),
]
PASSWORD = f"pass-{secrets.token_hex(8)}"


@pytest.mark.parametrize(
    ("rights", "sources"), USED, ids=["worker", "router", "autoscaler", "worker-index", "router-index"]
)
def test_a_component_declares_every_command_of_its_scripts(rights, sources):
    called = {name.lower() for one in sources for name in re.findall(r"\bcall\(\s*'(\w+)'", one)}
    assert len(called) >= 4
    assert called <= set(rights("n").commands.split())


def test_the_charts_users_are_those_that_components_declare():
    assert redis_users.TARGET.read_text() == redis_users.document(), "make chart writes it"
    assert redis_users.INDEX_TARGET.read_text() == redis_users.index_document(), "and this one"


def test_calls_cover_all_rules():
    for rights in RIGHTS.values():
        wanted = set(rights("n").rules.split()) - {"+multi", "+discard"}
        assert {rule for rule, _ in rights("n").calls()} == wanted


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    made = EmbeddedRedis.start(tmp_path / "redis")
    yield made
    made.stop()


def limited(server: EmbeddedRedis, rights: Rights, *but: str) -> str:
    """The URL of a user with these rights, but for some; Redis 6 has no keys that are only read."""
    rules = [rule.replace("%R~", "~") for rule in rights.rules.split()]
    with connect(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "u", "reset", "on", f">{PASSWORD}", *rules, *but)
    return server.url.replace("unix://", f"unix://u:{PASSWORD}@")


@pytest.mark.parametrize("component", RIGHTS)
def test_what_a_component_declares_is_all_it_lacks_nothing_of(component, server):
    url = limited(server, RIGHTS[component]("n"))
    with connect(url) as client:
        assert lacking(client, RIGHTS[component]("n")) == []
        assert lacking(client, RIGHTS[component]("other"))
    assert check_rights(url, component, "n").grade == "ok"


def test_missing_rights_are_named_as_rules_to_add(server, capsys):
    url = limited(server, of_worker("n"), "-hset", "-script")
    assert (
        too_few_rights(url, of_worker("n"))
        == "Redis user u has too few rights for the worker: it lacks +hset +script|load; add them (ACL SETUSER u …, "
        "docs/security.md, Redis)"
    )
    report_redis(url, of_worker("n"))
    said = " ".join(capsys.readouterr().out.split())
    assert "it lacks +hset +script|load" in said and "starting anyway" in said and PASSWORD not in said
    found = check_rights(url, "worker", "n")
    assert (found.grade, found.found) == ("missing", "lacks +hset +script|load")


def test_keys_of_another_namespace_are_named(server):
    url = limited(server, of_worker("n"))
    assert "~{other}:members" in too_few_rights(url, of_worker("other"))


def test_nothing_is_said_where_nothing_can_be_asked(server):
    """Of a user with the rights that were enough before this check: no MULTI."""
    url = limited(server, of_worker("n"), "-multi", "-hset")
    with connect(server.url) as admin, connect(url) as client:
        admin.hset("{n}:members", "a", "b")
        assert lacking(client, of_worker("n")) is None
        assert admin.hgetall("{n}:members") == {b"a": b"b"}
    assert too_few_rights(url, of_worker("n")) == ""
    assert too_few_rights("redis://127.0.0.1:1", of_worker("n")) == ""


@pytest.mark.parametrize("rules", [(), ("~{n}:members", "+ping", "+info")])
def test_the_doctor_does_not_approve_a_user_that_cannot_be_asked(rules, server):
    with connect(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "u", "reset", "on", f">{PASSWORD}", *rules)
    check = check_rights(server.url.replace("unix://", f"unix://u:{PASSWORD}@"), "worker", "n")
    assert check.grade == "warning" and "unknown" in check.found
    assert "+multi +discard" in check.advice


def test_rights_that_become_unknown_are_not_reported_as_granted(server, caplog):
    url = limited(server, of_worker("n"), "-hset")
    watch = RightsWatch(url, of_worker("n"))
    with caplog.at_level("INFO"):
        watch.look()
        limited(server, of_worker("n"), "-hset", "-multi")
        watch.look()
    assert "it lacks +hset" in caplog.text and "grants all" not in caplog.text


def test_a_user_without_ping_is_told_so(server, capsys):
    """Its Redis answers: it refuses, which is no silence."""
    report_redis(limited(server, of_worker("n"), "-ping"), of_worker("n"))
    said = " ".join(capsys.readouterr().out.split())
    assert "it lacks +ping; add" in said and "no Redis answers" not in said


def test_a_user_that_may_not_select_its_database_is_told_so(server, capsys, caplog):
    """It is refused while it connects, before any question."""
    url = limited(server, of_worker("n"), "-select") + "?db=1"
    report_redis(url, of_worker("n"))
    said = " ".join(capsys.readouterr().out.split())
    assert "refuses its user" in said and "select" in said and PASSWORD not in said
    RightsWatch(url, of_worker("n")).look()
    assert "refuses its user" in caplog.text and PASSWORD not in caplog.text


def test_connections_make_no_call_that_users_of_components_may_not(server):
    with connect(server.url) as client:
        assert client.connection_pool.make_connection().driver_info is None


def test_asking_changes_nothing_even_for_a_user_that_may_do_anything(server):
    with connect(server.url) as admin:
        admin.hset("{n}:members", "a", "b")
        for component, rights in RIGHTS.items():
            assert lacking(admin, rights("n")) == [], component
        assert admin.keys() == [b"{n}:members"] and admin.hgetall("{n}:members") == {b"a": b"b"}


def test_the_doctor_names_a_user_that_may_not_read_the_memory(server):
    url = limited(server, of_autoscaler("n"))
    for check in (check_redis(url), check_server(url, "n")):
        assert check.grade == "warning" and "+info" in check.advice
        assert PASSWORD not in check.found


def test_the_doctor_finds_no_server():
    check = check_rights(f"redis://u:{PASSWORD}@127.0.0.1:1", "worker", "n")
    assert check.grade == "missing" and PASSWORD not in check.found


def test_reading_without_the_right_to_write_sees_the_same_workers(server):
    worker = RegisteredWorker(server.url, "n", "decode", "d0")
    worker.publish(running=3)
    worker.registration.set_draining("exit")
    with connect(server.url) as admin:
        admin.hset("{n}:members", "old", admin.hget("{n}:members", "d0"))  # without a lease
        there = look_at_workers(limited(server, of_autoscaler("n")), "n")
        assert [one.worker_id for one in there] == ["d0"]
        assert admin.hexists("{n}:members", "old"), "it only reads"
    assert there == read_workers(server.url, "n")
    assert there[0].state == "draining" and there[0].status.running == 3
    worker.registration.stop()


def test_the_autoscaler_may_not_use_the_script_that_forgets_workers(server):
    with pytest.raises(redis.ResponseError):
        read_workers(limited(server, of_autoscaler("n")), "n")
