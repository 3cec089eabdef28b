"""The rights of a component in Redis: the ACL rules of its user, and those that a user lacks.

Redis's own refusals name neither the key nor, from inside a script, what to grant. `lacking` asks for every command and
key in a transaction that is discarded, so nothing is executed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import redis

from cluster.redis.connect import connect
from cluster.redis.urls import without_password

log = logging.getLogger(__name__)
Component = Literal["router", "worker", "autoscaler", "router-index", "worker-index"]
WATCH_SECONDS = 30.0
# Commands with which any component connects, and asks what it may do.
_EVERYWHERE = ("discard", "multi", "ping", "select")
_KEYLESS = {
    "eval": ("", 0),
    "evalsha": ("", 0),
    "info": (),
    "ping": (),
    "script|load": ("",),
    "select": (0,),
    "time": (),
}
# Arguments behind the key, by their number; their values do not matter, as nothing is executed.
_BEHIND_KEY = (
    frozenset({"decr", "del", "exists", "get", "hgetall", "hlen", "hrandfield", "incr", "zcard"}),
    frozenset(
        {
            "append",
            "hdel",
            "hexists",
            "hget",
            "hmget",
            "hscan",
            "pexpireat",
            "set",
            "zmscore",
            "zrem",
            "zscore",
        }
    ),
    frozenset({"hincrby", "hset", "hsetnx", "zadd", "zcount", "zrange", "zrangebyscore", "zremrangebyrank"}),
)


@dataclass(frozen=True)
class Rights:
    """Keys are ACL patterns: `*` stands for the part of a name that is open. GET and SET are among the commands, as
    `calls` tries every key with them."""

    component: Component
    keys: tuple[str, ...]  # read and written
    commands: str  # separated by spaces, a subcommand as in "script|load"
    read_keys: tuple[str, ...] = ()  # only read

    @property
    def rules(self) -> str:
        """The ACL rules of a user with these rights and no others, in a Redis ≥ 7 or a Valkey."""
        keys = [f"~{key}" for key in self.keys] + [f"%R~{key}" for key in self.read_keys]
        return " ".join([*keys, *(f"+{name}" for name in sorted({*_EVERYWHERE, *self.commands.split()}))])

    def calls(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Each rule, and a call that Redis refuses without it."""
        for name in sorted({*_EVERYWHERE, *self.commands.split()} - {"multi", "discard"}):
            yield f"+{name}", (*name.split("|"), *self._arguments(name))
        for key in self.keys:
            yield f"~{key}", ("set", key, "")
        for key in self.read_keys:
            yield f"%R~{key}", ("get", key)

    def _arguments(self, name: str) -> Sequence[Any]:
        if name in _KEYLESS:
            return _KEYLESS[name]
        (count,) = [count for count, names in enumerate(_BEHIND_KEY) if name in names]
        return (self.keys[0], *[""] * count)


class Servers(Protocol):
    """The settings that say where Redis is."""

    @property
    def redis_url(self) -> str: ...

    @property
    def index_url(self) -> str: ...


def by_server(config: Servers, registry: Rights, index: Rights) -> list[tuple[str, Rights]]:
    """The servers, and what a component needs of each: of one for all, `registry`; `index` of the prefix index's own."""
    return [(config.redis_url, registry), *([(config.index_url, index)] if config.index_url else [])]


def lacking(client: redis.Redis, rights: Rights) -> list[str] | None:
    """The ACL rules that the user of `client` lacks; None if it may not use MULTI, as then it cannot be asked.

    Raises redis.RedisError or OSError if Redis does not answer.
    """
    connection: Any = client.connection_pool.get_connection()
    try:
        connection.send_command("MULTI")
        try:
            connection.read_response()
        except redis.exceptions.NoPermissionError:
            return None
        rules, calls = zip(*rights.calls(), strict=True)
        connection.send_packed_command(connection.pack_commands([*calls, ("DISCARD",)]))
        answers = [_answer(connection) for _ in (*calls, "DISCARD")]
        return [
            rule
            for rule, answer in zip(rules, answers, strict=False)
            if isinstance(answer, redis.exceptions.NoPermissionError)
        ]
    finally:
        connection.disconnect()  # whatever it has queued is discarded
        client.connection_pool.release(connection)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


def why_refused(client: redis.Redis, rights: Rights) -> str | None:
    """A sentence with the rules to add; "" if the user of `client` lacks none, None if it cannot be asked. Raises as
    `lacking` does."""
    rules = lacking(client, rights)
    if not rules:
        return None if rules is None else ""
    user = client.connection_pool.connection_kwargs.get("username") or "default"
    return (
        f"Redis user {user} has too few rights for the {rights.component}: it lacks {' '.join(rules)}; "
        f"add them (ACL SETUSER {user} …, docs/security.md, Redis)"
    )


def too_few_rights(url: str, rights: Rights) -> str:
    """`why_refused` for a process that starts; "" also if that is unknown."""
    try:
        return _why_refused_at(url, rights) or ""
    except (redis.RedisError, OSError) as error:
        log.debug("the rights at %s are unknown: %s", without_password(url), error)
        return ""


def _why_refused_at(url: str, rights: Rights) -> str | None:
    """`why_refused` over a connection of its own."""
    client = connect(url)
    try:
        return why_refused(client, rights)
    except redis.exceptions.NoPermissionError as error:  # at the connection: the right to select a database
        return f"Redis at {without_password(url)} refuses its user: {error}"
    finally:
        client.close()


class RightsWatch:
    """Logs the rights that the user lacks, at start and when they change. An unreachable Redis is reported elsewhere."""

    def __init__(self, url: str, rights: Rights):
        self._url = url
        self._rights = rights
        self._why = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis-rights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def look(self) -> None:
        try:
            why = _why_refused_at(self._url, self._rights)
        except (redis.RedisError, OSError):
            return
        if why is None:
            return
        if why and why != self._why:
            log.error("%s", why)
        elif self._why and not why:
            log.info("Redis grants all rights that the %s needs", self._rights.component)
        self._why = why

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(WATCH_SECONDS)
