"""Reads a role's configuration: YAML file, then environment (`BATON_…`), then flags, the later winning.

Secrets may lie in files (a mounted Secret): they are read here, once, and what comes out holds them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from cluster.config.base import Frozen
from cluster.config.environment import SETTINGS, empty_variable, not_json, refuse_empty_paths
from cluster.config.reasons import reason
from cluster.config.shared import ClusterFields, IndexFields, SecretFields
from cluster.config.speculation import without_drafts
from cluster.config.unknown import no_such_setting
from cluster.config.yaml_file import read_settings
from cluster.errors import ConfigError
from cluster.redis.connect import check_url
from cluster.redis.urls import with_hash_tag, with_password

C = TypeVar("C", bound=Frozen)


def load(
    config: type[C],
    flags: Mapping[str, Any],
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> C:
    """A validated configuration. `flags` holds only what was given, nested like the model; `values` is what a file
    would say that has been read already.

    Nested fields are `BATON_ENGINE__DTYPE` in the environment. Workers of both roles may share an environment, as those of
    `baton up` do, so a prefill worker ignores the settings of speculation there. Raises ConfigError naming field and
    source's value.
    """
    written = read_settings(file) if file is not None else {}
    refuse_empty_paths(config, flags)

    class Sources(config, BaseSettings):  # type: ignore[valid-type, misc]
        model_config = SETTINGS

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            *_: Any,
            **__: Any,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            given, shared = dict(values or {}), env_settings()
            layers = (flags, shared, given, written)  # the first that has a setting wins
            if next((one["role"] for one in layers if "role" in one), "") == "prefill":
                shared = dict(without_drafts(shared))
            lower = (InitSettingsSource(settings_cls, one) for one in (shared, given, written))
            return init_settings, *lower

    try:
        merged = Sources(**flags)
    except ValidationError as error:
        raise ConfigError(_explain(error, config), field=_first_field(error)) from None
    except SettingsError as error:
        raise not_json(error) from None
    return with_secrets(config.model_validate(merged.model_dump()))


def with_secrets(config: C) -> C:
    """The configuration with what its files hold in place of their names. Raises ConfigError."""
    found: dict[str, Any] = {}
    if isinstance(config, SecretFields) and config.secret_file is not None:
        found |= {"secret": _read_secret(config.secret_file, "secret_file"), "secret_file": None}
    if isinstance(config, SecretFields):
        _check_key(found.get("secret", config.secret))
    if isinstance(config, ClusterFields):
        found |= _with_password(config, "redis", config.namespace)
        if isinstance(config, IndexFields):
            found |= _with_password(config, "index", config.namespace)
    return config.model_copy(update=found)


def _with_password(config: Frozen, name: str, namespace: str) -> dict[str, Any]:
    """The settings `name`_url, `name`_password and `name`_password_file, the password in the URL. Raises ConfigError."""
    url, password, file = (getattr(config, f"{name}_{part}") for part in ("url", "password", "password_file"))
    if file is not None:
        password = _read_secret(file, f"{name}_password_file")
    try:
        if password:
            url = with_password(url, password)
        if url:
            check_url(url)
            url = with_hash_tag(url, namespace)
    except ConfigError as error:
        text, field = (one.replace("redis_", f"{name}_") for one in (error.message, error.field))
        raise ConfigError(text, field=field) from None
    return {f"{name}_url": url, f"{name}_password": "", f"{name}_password_file": None}


def _check_key(secret: str) -> None:
    """Raise ConfigError if `secret` cannot key block hashes and tickets: every request would fail."""
    most = hashlib.blake2b.MAX_KEY_SIZE
    with contextlib.suppress(UnicodeEncodeError):  # environment variables may hold bytes that are not UTF-8
        if len(secret.encode()) <= most:
            return
    raise ConfigError(
        f"the deployment's secret (BATON_SECRET or the secret file) must be UTF-8 and at most {most} bytes; "
        "`openssl rand -hex 32` generates one",
        field="secret",
        limit=str(most),
    )


def require_secret(config: SecretFields) -> None:
    """Raise ConfigError if there is no secret. A default would be public, and with the secret anyone can compute other
    tenants' block hashes and forge resume tickets."""
    if not config.secret:
        raise ConfigError(
            "the deployment's secret is missing: give every router and worker the same one, by BATON_SECRET or "
            "--secret-file; `openssl rand -hex 32` makes one",
            field="secret",
        )


def require_redis(config: ClusterFields) -> None:
    """Raise ConfigError if there is no Redis URL."""
    if not config.redis_url:
        raise ConfigError(
            "redis_url is missing: routers and workers find each other in Redis; give all of them the same one, by "
            "BATON_REDIS_URL or --redis-url redis://host:6379",
            field="redis_url",
        )


def _read_secret(file: Path, field: str) -> str:
    try:
        secret = file.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", field=field) from None
    if not secret:
        raise ConfigError(f"{file} is empty", field=field)
    return secret


def _first_field(error: ValidationError) -> str:
    return ".".join(str(part) for part in error.errors()[0]["loc"])


def _explain(error: ValidationError, config: type[Frozen]) -> str:
    return "configuration is not valid: " + "; ".join(_sentence(one, config) for one in error.errors())


def _sentence(problem: ErrorDetails, config: type[Frozen]) -> str:
    if problem["type"] == "extra_forbidden":
        return no_such_setting(config, problem["loc"]) + _hint(problem)
    if problem["type"] == "missing":
        return reason(problem, config)
    return f"{'.'.join(map(str, problem['loc']))}: {reason(problem, config)}{_hint(problem)}"


def _hint(problem: ErrorDetails) -> str:
    """Kubernetes puts BATON_PORT=tcp://… into every pod beside a Service called baton; scripts put BATON_PORT= where what
    they insert is missing."""
    value = problem["input"]
    if value == "" and (variable := empty_variable([str(part) for part in problem["loc"]])):
        return f" ({variable} is empty: unset it, or give it a value)"
    if isinstance(value, str) and value.startswith("tcp://"):
        return f" (the environment says {value}: a service link; set enableServiceLinks: false on the pod)"
    return ""
