"""Redis URLs: several servers in one, and adding, removing and hiding their passwords.

    redis://[user:password@]host:port/0[?…]                 one server
    redis+sentinel://[user:password@]host:port,…/master[?…] the master that these sentinels name
    redis+cluster://[user:password@]host:port,…[?…]         the cluster's node that has the namespace's keys

`rediss` in place of `redis` is TLS. redis-py takes a password from the part before the host (`user:password@`) or from
the query (`password=`); the former wins. Query names and values are percent-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote, unquote_plus, urlsplit

from redis.connection import parse_url

from cluster.addresses import join
from cluster.errors import ConfigError

Kind = Literal["sentinel", "cluster"]
_PORTS: Mapping[str, int] = {"sentinel": 26379, "cluster": 6379}
# Query names that are Baton's, not redis-py's.
_SENTINEL_USER, _SENTINEL_PASSWORD, _HASH_TAG = "sentinel_username", "sentinel_password", "hash_tag"


class Address(NamedTuple):
    host: str  # an IPv6 address without its brackets
    port: int

    @classmethod
    def checked(cls, host: str, port: int) -> Self:
        """Return the address. Raises ValueError for one for which a socket would raise UnicodeError or OverflowError,
        and not OSError."""
        if not host or "\0" in host or not 0 < port < 1 << 16:
            raise ValueError("no address")
        host.encode("idna")  # UnicodeError: a part of the name is too long
        return cls(host, port)

    def __str__(self) -> str:
        return join(self.host, self.port)


@dataclass(frozen=True)
class Seeds:
    """Servers that are asked which one has the keys."""

    kind: Kind
    addresses: tuple[Address, ...]
    name: str  # of the master; of a cluster, the keys' hash tag ("" = not known yet)
    tls: bool
    options: Mapping[str, Any] = field(repr=False)  # of a connection to the server with the keys
    ask_options: Mapping[str, Any] = field(repr=False)  # of one to a seed


def seeds_of(url: str) -> Seeds | None:
    """The seeds in a URL of several servers; None for a URL of one server. Raises ConfigError without the URL's text."""
    kind = _kind(url)
    if kind is None:
        return None
    parts = _split(url)
    scheme = parts.scheme.partition("+")[0]
    user, at, hosts = parts.netloc.rpartition("@")
    kept, own = [], {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in (_SENTINEL_USER, _SENTINEL_PASSWORD, _HASH_TAG):
            own[name] = value
        else:
            kept.append(f"{quote(name, safe='')}={quote(value, safe='')}")
    try:
        addresses = tuple(_address(text, _PORTS[kind]) for text in hosts.split(","))
        options = parse_url(f"{scheme}://{user}{at}seed?{'&'.join(kept)}")  # type: ignore[no-untyped-call]
    except ValueError as error:
        _refuse(f"redis_url is not a URL of several servers: {error}")
    del options["host"]
    options.pop("connection_class", None)
    name = _name(kind, parts.path, int(options.get("db", 0)), own.get(_HASH_TAG, ""))
    asking = {name: value for name, value in options.items() if name != "db"}
    if kind == "sentinel":
        asking = {name: value for name, value in asking.items() if name not in ("username", "password")}
        given = {"username": own.get(_SENTINEL_USER), "password": own.get(_SENTINEL_PASSWORD)}
        asking |= {name: value for name, value in given.items() if value}
    return Seeds(kind, addresses, name, scheme == "rediss", options, {**asking, "ssl": scheme == "rediss"})


def _name(kind: Kind, path: str, database: int, hash_tag: str) -> str:
    if kind == "sentinel":
        if not (name := unquote(path.strip("/"))) or "/" in name:
            _refuse(
                "a redis+sentinel:// URL ends with the master's name: redis+sentinel://host:26379/mymaster"
            )
        return name
    if path.strip("/") not in ("", "0") or database != 0:
        _refuse("a Redis Cluster has database 0 only: write redis+cluster://host:6379")
    return hash_tag


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message, field="redis_url") from None


def _address(text: str, port: int) -> Address:
    """Raises ValueError, without the text: it may be a part of a password."""
    host, found, rest = text, "", ""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError("an IPv6 address stands in brackets, as in [::1]:6379")
        found = rest[1:]
    elif ":" in text:
        host, _, found = text.partition(":")
    if not host or ":" in found:
        raise ValueError("each server is host:port, separated by commas; IPv6 addresses stand in brackets")
    if found and not (found.isascii() and found.isdigit() and 0 < int(found) < 65536):
        raise ValueError("a port is a number from 1 to 65535")
    return Address(unquote(host), int(found) if found else port)


def with_hash_tag(url: str, namespace: str) -> str:
    """Return a cluster's URL with the hash tag that all keys of `namespace` share; any other URL as it is.

    Raises ConfigError if the namespace is empty: its keys would have no common slot.
    """
    if _kind(url) != "cluster":
        return url
    if not namespace:
        raise ConfigError("a Redis Cluster needs a namespace: it is its keys' hash tag", field="namespace")
    parts = _split(url)
    kept = [text for text, name in _query(parts) if name != _HASH_TAG]
    return _joined(parts, parts.netloc, "&".join([*kept, f"{_HASH_TAG}={quote(namespace, safe='')}"]))


def without_password(url: str) -> str:
    """Return the URL for display, with user and password as stars.

    Of a malformed URL only the scheme is shown: an unescaped character of the password may have ended its host.
    """
    try:
        parts = _split(url)
        if _kind(url) is None:
            _ = parts.port  # ValueError if it is no number
        else:
            for host in parts.netloc.rpartition("@")[2].split(","):
                _address(host, 1)
        items = _query(parts)
        shown = [text if "password" not in name else name for text, name in items]
        malformed = any("@" in part for part in (parts.path, parts.fragment, *shown))
    except (ValueError, ConfigError):
        malformed = True
    if malformed:
        scheme, mark, _ = url.partition("://")
        return f"{scheme}{mark}***" if mark else "***"
    query = "&".join(f"{text.partition('=')[0]}=***" if "password" in name else text for text, name in items)
    _, at, host = parts.netloc.rpartition("@")
    return _joined(parts, f"***@{host}" if at else host, query)


def split_password(url: str) -> tuple[str, str]:
    """Return the URL without its password, and the password ("" if it has none).

    Raises ConfigError if the URL holds a secret that no other setting can hold.
    """
    parts = _split(url)
    user, _, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    password, kept = unquote(password), []
    for text, key in _query(parts):
        if key == "password":
            password = password or unquote_plus(text.partition("=")[2])
        elif "password" in key:
            raise ConfigError(
                f"redis_url holds {key}, which Ray would keep and show: use a file that needs none",
                field="redis_url",
            )
        else:
            kept.append(text)
    return _joined(parts, f"{name}@{host}" if name else host, "&".join(kept)), password


def with_password(url: str, password: str) -> str:
    """Return the URL with a password added. Raises ConfigError if it is no URL or has a password already."""
    parts = _split(url)
    if not parts.scheme or "://" not in url:
        raise ConfigError("a Redis password needs a redis_url to go with", field="redis_url")
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user or any(name == "password" for _, name in _query(parts)):
        raise ConfigError("redis_url names a password already: give it once", field="redis_password")
    if parts.scheme == "unix" and not at:
        query = f"{parts.query}&" if parts.query else ""
        return _joined(parts, host, f"{query}password={quote(password, safe='')}")
    return _joined(parts, f"{user}:{quote(password, safe='')}@{host}", parts.query)


def _kind(url: str) -> Kind | None:
    """Raises ConfigError for a scheme that nearly is one of these."""
    tls, plus, kind = url.partition("://")[0].partition("+")
    if not plus:
        return None
    if tls not in ("redis", "rediss") or kind not in _PORTS:
        _refuse(
            "redis_url begins with redis+sentinel://, redis+cluster://, or rediss in place of redis for TLS"
        )
    return "sentinel" if kind == "sentinel" else "cluster"


def _split(url: str) -> SplitResult:
    """urlsplit, for several hosts too: it would refuse some lists of IPv6 addresses."""
    scheme, mark, rest = url.partition("://")
    if "+" not in scheme or not mark:
        return urlsplit(url)
    rest, _, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    netloc, slash, path = rest.partition("/")
    return SplitResult(scheme, netloc, slash + path, query, fragment)


def _query(parts: SplitResult) -> list[tuple[str, str]]:
    """The query's items as they stand, each with its decoded name."""
    return [(text, unquote_plus(text.partition("=")[0])) for text in parts.query.split("&") if text]


def _joined(parts: SplitResult, netloc: str, query: str) -> str:
    """Like urlunsplit, which would drop the slashes of an empty host."""
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    scheme = f"{parts.scheme}://" if parts.scheme else ""
    return f"{scheme}{netloc}{parts.path}{'?' if query else ''}{query}{fragment}"
