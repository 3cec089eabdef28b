"""Redis URLs: adding, removing and hiding their passwords.

redis-py takes a password from the part before the host (`user:password@`) or from the query (`password=`); the former
wins. Query names and values are percent-encoded.
"""

from __future__ import annotations

from urllib.parse import SplitResult, quote, unquote, unquote_plus, urlsplit

from cluster.errors import ConfigError


def without_password(url: str) -> str:
    """Return the URL for display, with user and password as stars.

    Of a malformed URL only the scheme is shown: an unescaped character of the password may have ended its host.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError if it is no number
        items = _query(parts)
        shown = [text if "password" not in name else name for text, name in items]
        malformed = any("@" in part for part in (parts.path, parts.fragment, *shown))
    except ValueError:
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
    parts = urlsplit(url)
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
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        raise ConfigError("a Redis password needs a redis_url to go with", field="redis_url")
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user or any(name == "password" for _, name in _query(parts)):
        raise ConfigError("redis_url names a password already: give it once", field="redis_password")
    if parts.scheme == "unix" and not at:
        query = f"{parts.query}&" if parts.query else ""
        return _joined(parts, host, f"{query}password={quote(password, safe='')}")
    return _joined(parts, f"{user}:{quote(password, safe='')}@{host}", parts.query)


def _query(parts: SplitResult) -> list[tuple[str, str]]:
    """The query's items as they stand, each with its decoded name."""
    return [(text, unquote_plus(text.partition("=")[0])) for text in parts.query.split("&") if text]


def _joined(parts: SplitResult, netloc: str, query: str) -> str:
    """Like urlunsplit, which would drop the slashes of an empty host."""
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    scheme = f"{parts.scheme}://" if parts.scheme else ""
    return f"{scheme}{netloc}{parts.path}{'?' if query else ''}{query}{fragment}"
