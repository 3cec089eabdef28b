"""API keys: creation, stored form, and check.

    key   = baton-<id>-<secret>       id: 8 bytes, secret: 32 random bytes; only the client keeps it
    entry = id, sha256(id ‖ secret)   the id is the salt, and finds the entry without trying all of them

A fast hash is right here: the secret is 256 random bits, so there is no dictionary to try and nothing for a slow hash to
protect, while a slow hash on every request would let clients exhaust the router.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, field_validator

from cluster.config.base import Frozen, no_flag
from cluster.errors import ConfigError, UnauthenticatedError
from cluster.protocol.priority import PriorityClass

PREFIX = "baton"
ID_BYTES = 8
SECRET_BYTES = 32
MAX_KEY_CHARACTERS = 256
MAX_MODELS = 1024  # of one key, adapters included
ModelName = Annotated[str, Field(min_length=1, max_length=256)]


@dataclass(frozen=True)
class RateLimits:
    """Rate limits of a tenant over all routers; false if it has none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __bool__(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


NO_LIMITS = RateLimits()


class ModelLimits(Frozen):
    """Limits of a key's tenant on one model, beside those on all models together. The class is the key's, in place of its
    own for all models."""

    panel = "Options"

    max_concurrent_requests: int | None = Field(None, ge=1, description="at each router")
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="over all routers")
    tokens_per_minute: int | None = Field(
        None, ge=1, le=10**12, description="prompt and output tokens, over all routers"
    )
    max_priority: PriorityClass | None = Field(
        None, description="highest class of requests for it; default: the key's"
    )

    @property
    def rate_limits(self) -> RateLimits:
        return RateLimits(self.requests_per_minute, self.tokens_per_minute)


NO_MODEL_LIMITS = ModelLimits()


class KeyEntry(Frozen):
    """One key in the file. The tenant is its owner; several keys may share one."""

    panel = "Options"

    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    # Without control characters, with which names of other holders begin (router/admission), and without what ends a line
    # in YAML: `baton keys new` prints the name in a comment of what is added to the file.
    tenant: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$")
    key_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    weight: float = Field(1.0, gt=0, le=1000, description="share of a crowded cluster, beside other tenants'")
    max_priority: PriorityClass = Field(
        "normal", description="highest class of its requests: a higher class enters before all others"
    )
    expires_at: datetime.datetime | None = None
    revoked: bool = False
    admin: bool = Field(
        False, description="may read /metrics and /v1/cluster; sees workers and queues of its requests"
    )
    max_concurrent_requests: int | None = Field(
        None, ge=1, description="of the tenant; default: the router's"
    )
    requests_per_minute: int | None = Field(
        None, ge=1, le=10**9, description="of the tenant, over all routers; default: the routers'"
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        le=10**12,
        description="prompt and output tokens of the tenant, over all routers; default: the routers'",
    )

    models: tuple[ModelName, ...] = Field(
        (),
        max_length=MAX_MODELS,
        description="models that its requests may name, with their aliases; adapters by their own names; empty = all",
    )
    model_limits: dict[ModelName, ModelLimits] = no_flag(
        {},
        max_length=MAX_MODELS,
        description="limits of the tenant on single models, by name, not an alias, nor an adapter's, whose requests count "
        "for its model: max_concurrent_requests, requests_per_minute, tokens_per_minute, max_priority",
    )

    @field_validator("expires_at")
    @classmethod
    def _in_utc(cls, value: datetime.datetime | None) -> datetime.datetime | None:
        """A time without a zone is UTC: YAML readers drop the zone of a UTC time."""
        if value is not None and value.tzinfo is None:
            return value.replace(tzinfo=datetime.UTC)
        return value


@dataclass(frozen=True)
class Caller:
    """The owner of a request. Without API keys all requests belong to one unnamed tenant."""

    tenant: str = ""
    key_id: str = ""
    weight: float = 1.0
    max_priority: PriorityClass = "normal"
    admin: bool = False
    max_concurrent_requests: int | None = None
    rate_limits: RateLimits = NO_LIMITS
    models: frozenset[str] = frozenset()  # that it may name; empty: all
    model_limits: Mapping[str, ModelLimits] = field(default_factory=dict)

    def may_name(self, model: str) -> bool:
        """`model`: of the router, not an alias; or an adapter."""
        return not self.models or model in self.models

    def limits_of(self, model: str) -> ModelLimits:
        return self.model_limits.get(model, NO_MODEL_LIMITS)

    def highest_class(self, model: str) -> PriorityClass:
        return self.limits_of(model).max_priority or self.max_priority


ANYONE = Caller(max_priority="high", admin=True)


def new_key(tenant: str, **fields: object) -> tuple[str, KeyEntry]:
    """Generate a key and its entry. The key itself is stored nowhere."""
    key_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    entry = KeyEntry.model_validate(
        {**fields, "id": key_id, "tenant": tenant, "key_sha256": _digest(key_id, secret)}
    )
    return f"{PREFIX}-{key_id}-{secret}", entry


def _digest(key_id: str, secret: str) -> str:
    return hashlib.sha256(key_id.encode() + secret.encode()).hexdigest()


class KeyRing:
    """The keys of one file, by id. Raises ConfigError where two entries have the same id."""

    def __init__(self, entries: Iterable[KeyEntry]):
        self._entries: dict[str, KeyEntry] = {}
        for entry in entries:
            if entry.id in self._entries:
                raise ConfigError(f"API key {entry.id} occurs twice", field="api_keys_file")
            self._entries[entry.id] = entry

    def __len__(self) -> int:
        return len(self._entries)

    def named_models(self) -> Iterator[tuple[int, str, str]]:
        """The models that entries name, each with the entry's number and the field."""
        for number, entry in enumerate(self._entries.values(), 1):
            yield from ((number, "models", name) for name in entry.models)
            yield from ((number, "model_limits", name) for name in entry.model_limits)

    def check(self, authorization: str, now_seconds: float) -> Caller:
        """Return the caller behind an `Authorization` value.

        Raises UnauthenticatedError, which says only that a key is missing or not valid, never why.
        """
        scheme, _, key = authorization.partition(" ")
        if not authorization or scheme.lower() != "bearer":
            raise UnauthenticatedError(
                "an API key is needed: Authorization: Bearer <key>", field="authorization"
            )
        entry = self._find(key.strip())
        if entry is None or entry.revoked or _expired(entry, now_seconds):
            raise UnauthenticatedError("the API key is not valid", field="authorization")
        return Caller(
            entry.tenant,
            entry.id,
            entry.weight,
            entry.max_priority,
            entry.admin,
            entry.max_concurrent_requests,
            RateLimits(entry.requests_per_minute, entry.tokens_per_minute),
            frozenset(entry.models),
            entry.model_limits,
        )

    def _find(self, key: str) -> KeyEntry | None:
        """Find the entry of a key; takes the same time wherever digests differ, also for an unknown id."""
        prefix, _, rest = key[:MAX_KEY_CHARACTERS].partition("-")
        key_id, _, secret = rest.partition("-")
        entry = self._entries.get(key_id)
        expected = entry.key_sha256 if entry is not None else "0" * 64
        same = hmac.compare_digest(_digest(key_id, secret), expected)
        return entry if same and prefix == PREFIX else None


def _expired(entry: KeyEntry, now_seconds: float) -> bool:
    return entry.expires_at is not None and entry.expires_at.timestamp() <= now_seconds
