"""Secrets in files, for processes whose settings pass through Ray, which stores and shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton import safe_files
from cluster.config.worker import WorkerConfig
from cluster.redis.urls import split_password


def without_secrets(config: WorkerConfig, directory: Path) -> dict[str, Any]:
    """Return the settings with each secret replaced by the name of a file that holds it, which `settings.load` reads.

    Raises OSError if they cannot be written, ConfigError if redis_url holds another secret than its password.
    """
    given = config.model_dump(mode="json", exclude={"worker_id"})
    given["redis_url"], password = split_password(config.redis_url)
    for field, content in {"secret": config.secret, "redis_password": password}.items():
        if content:
            safe_files.replace(directory / field, content.encode())
            given |= {field: "", f"{field}_file": str(directory / field)}
    return given
