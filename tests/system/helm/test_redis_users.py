"""The users of the chart's Redis: each reaches the keys and commands of its component and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from baton.doctor.redis_check import RIGHTS
from cluster.redis.connect import connect
from cluster.redis.rights import RightsWatch, lacking, too_few_rights
from tests.system.helm.chart_redis import NAMESPACE, USERS, ChartRedis, run_chart_redis
from tests.system.helm.rendering import Renderer

pytestmark = pytest.mark.system
Refused = redis.exceptions.NoPermissionError
# key → what router, worker and autoscaler may do with it
TABLE = {
    "members": ("rw", "rw", "r"),
    "leases": ("rw", "rw", "r"),
    "status": ("rw", "rw", "r"),
    "drains": ("rw", "rw", "r"),
    "slots": ("rw", "rw", ""),
    "owners": ("rw", "rw", ""),
    "sequences": ("rw", "rw", ""),
    "index:model:n:12345678": ("rw", "rw", ""),
    "index:model:w:12345678": ("rw", "rw", ""),
    "facts": ("rw", "rw", ""),
    "generation": ("rw", "rw", ""),
    "set:0123456789ab:p": ("rw", "rw", ""),
    "load": ("rw", "r", ""),
    "adapters": ("rw", "rw", ""),
    "calls": ("rw", "", ""),
    "routers": ("rw", "", ""),
    "runs": ("rw", "", ""),
    "chg:router-1": ("rw", "", ""),
    "chg:router-1:5": ("rw", "", ""),
    "answers:router-1": ("rw", "", ""),
    "quota:acme": ("rw", "", ""),
    "quota:a:n:tenant": ("rw", "", ""),
    "quota-request:abc": ("rw", "", ""),
    "quota-expiry": ("rw", "", ""),
    "quota-applied": ("rw", "", ""),
    "router_reports": ("rw", "", ""),
    "autoscaler": ("", "", "rw"),
    "autoscaler-until": ("", "", "rw"),
    "anything-else": ("", "", ""),
}
ELSEWHERE = ("{other-t}:members", "members", f"RAY{NAMESPACE}@KV", "DUMMY", "*")
ADMINISTRATION: tuple[tuple[Any, ...], ...] = (
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", 1),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "worker", "+@all"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "TRACKING", "on", "BCAST"),
    ("MONITOR",),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "no", "one"),
    ("SAVE",),
    ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"),
    ("FUNCTION", "LIST"),
    ("PUBLISH", "channel", "message"),
    ("MODULE", "LIST"),
    ("SLOWLOG", "GET"),
)


@pytest.fixture(scope="module")
def server(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartRedis]:
    with run_chart_redis(renderer, tmp_path_factory.mktemp("redis")) as running:
        yield running


def _allowed(client: redis.Redis, *call: Any) -> bool:
    try:
        client.execute_command(*call)
    except Refused:
        return False
    return True


@pytest.mark.parametrize("user", USERS)
def test_each_key_is_open_to_the_components_that_use_it(user: str, server: ChartRedis) -> None:
    with server.as_user(user) as client:
        found = {}
        for name in TABLE:
            key = f"{{{NAMESPACE}}}:{name}"
            reads = _allowed(client, "GET", key)
            writes = _allowed(client, "SET", key, "1")
            found[name] = "r" * reads + "w" * writes
        assert found == {name: rights[USERS.index(user)] for name, rights in TABLE.items()}
        for key in ELSEWHERE:
            assert not _allowed(client, "GET", key) and not _allowed(client, "SET", key, "1"), key


@pytest.mark.parametrize("user", USERS)
def test_a_script_reaches_no_further_than_its_caller(user: str, server: ChartRedis) -> None:
    """Whether its keys are declared or not."""
    script = "return redis.pcall(ARGV[1], ARGV[2], '1')"
    with server.as_user(user) as client:
        for name, rights in TABLE.items():
            key = f"{{{NAMESPACE}}}:{name}"
            may_write = "w" in rights[USERS.index(user)]
            assert _allowed(client, "EVAL", "return 1", 1, key) == may_write, "declared keys count as written"
            if may_write:
                client.eval(script, 0, "SET", key)
            else:
                with pytest.raises(redis.ResponseError, match=r"can't access|permission"):
                    client.eval(script, 0, "SET", key)


@pytest.mark.parametrize("user", USERS)
def test_no_component_may_administer(user: str, server: ChartRedis) -> None:
    for call in ADMINISTRATION:
        with server.as_user(user) as client, pytest.raises(Refused):
            client.execute_command(*call)


@pytest.mark.parametrize(
    ("user", "call"),
    [
        ("autoscaler", ("HSET", "members", "a", "b")),
        ("autoscaler", ("HDEL", "drains", "a")),
        ("autoscaler", ("INFO",)),
        ("worker", ("HINCRBY", "status", "a", 1)),
        ("worker", ("ZRANGEBYSCORE", "leases", 0, 1)),
        ("router", ("ZINCRBY", "leases", 1, "a")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_commands_that_a_component_does_not_use_are_refused(
    user: str, call: tuple[Any, ...], server: ChartRedis
) -> None:
    name, *rest = call
    arguments = [f"{{{NAMESPACE}}}:{rest[0]}", *rest[1:]] if rest else []
    with server.as_user(user) as client, pytest.raises(Refused):
        client.execute_command(name, *arguments)


def test_without_a_password_there_is_nothing(server: ChartRedis) -> None:
    address = server.urls["worker"].partition("@")[2]
    for url in (f"redis://{address}", f"redis://:{server.passwords['worker']}@{address}"):
        with connect(url) as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    wrong = f"redis://worker:{server.passwords['router']}@{address}"
    with connect(wrong) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()


@pytest.mark.parametrize("user", USERS)
def test_its_own_rights_are_enough_and_anothers_are_named(user: str, server: ChartRedis) -> None:
    for component, rights in RIGHTS.items():
        with server.as_user(user) as client:
            missing = lacking(client, rights(NAMESPACE))
        said = too_few_rights(server.urls[user], rights(NAMESPACE))
        # in one Redis a user may do what the index needs too
        if component.removesuffix("-index") in (("router", "worker") if user == "router" else (user,)):
            assert missing == [] and said == "", "a router may do all that a worker may"
        else:
            assert missing
            assert f"Redis user {user} has too few rights for the {component}: it lacks" in said
            assert all(rule in said for rule in missing)
            assert server.passwords[user] not in said
    if user == "worker":
        with server.as_user(user) as client:
            missing = lacking(client, RIGHTS["router"](NAMESPACE))
        assert (
            missing
            and f"~{{{NAMESPACE}}}:quota:*" in missing
            and "+hincrby" in missing
            and "+hset" not in missing
        )


def test_asking_for_rights_changes_nothing(server: ChartRedis) -> None:
    keys = [f"{{{NAMESPACE}}}:members", f"{{{NAMESPACE}}}:index:*:*"]
    with connect(server.admin) as admin, server.as_user("worker") as client:
        admin.flushall()
        admin.hset(keys[0], "a", "b")
        lacking(client, RIGHTS["worker"](NAMESPACE))
        assert admin.keys() == [keys[0].encode()] and admin.hgetall(keys[0]) == {b"a": b"b"}


def test_a_process_that_lacks_rights_says_so_once_and_when_they_are_given(
    server: ChartRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch = RightsWatch(server.urls["worker"], RIGHTS["worker"](NAMESPACE))
    with connect(server.admin) as admin:
        try:
            admin.execute_command("ACL", "SETUSER", "worker", "-hset")
            watch.look()
            watch.look()
        finally:
            admin.execute_command("ACL", "SETUSER", "worker", "+hset")
    (said,) = [one.message for one in caplog.records]
    assert "Redis user worker has too few rights for the worker: it lacks +hset; add them" in said
    watch.look()
    assert caplog.records[-1].message == "Redis grants all rights that the worker needs"
