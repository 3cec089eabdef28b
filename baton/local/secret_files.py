"""Secrets in files of their own, for processes whose settings pass through Ray: it keeps and shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from baton import safe_files
from cluster.config.worker import WorkerConfig


def without_secrets(config: WorkerConfig, directory: Path) -> dict[str, Any]:
    """The settings as a file would say them, with the names of files that hold the secrets; `settings.load` reads these.

    Raises OSError if they cannot be written.
    """
    given = config.model_dump(mode="json", exclude={"worker_id"})
    given["redis_url"], password = split_password(config.redis_url)
    for field, content in {"secret": config.secret, "redis_password": password}.items():
        if content:
            safe_files.replace(directory / field, content.encode())
            given |= {field: "", f"{field}_file": str(directory / field)}
    return given


def split_password(url: str) -> tuple[str, str]:
    """A Redis URL without its password, and the password; empty if it has none."""
    scheme, mark, rest = url.partition("://")
    user, at, address = rest.rpartition("@")
    name, _, password = user.partition(":")
    address, question, query = address.partition("?")
    kept = []
    for one in query.split("&"):
        if one.startswith("password="):
            password = one.removeprefix("password=")
        else:
            kept.append(one)
    question = question if kept else ""
    return f"{scheme}{mark}{name}{at if name else ''}{address}{question}{'&'.join(kept)}", unquote(password)
