"""Checks of the ids and names in messages between processes."""

from __future__ import annotations

import re

from cluster.errors import InvalidRequestError

TRANSFER_ID_BYTES = 16
ADAPTER_DIGEST = re.compile(r"[0-9a-f]{32}\Z")
MAX_NAME = 1024  # characters of a worker's or request's id, of a tenant


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequestError."""
    if len(name) > MAX_NAME:
        raise invalid(field, f"more than {MAX_NAME} characters")


def check_transfer_id(transfer_id: bytes) -> None:
    """Raises InvalidRequestError."""
    if len(transfer_id) != TRANSFER_ID_BYTES:
        raise invalid("transfer_id", f"{len(transfer_id)} bytes instead of {TRANSFER_ID_BYTES}")


def invalid(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}", field=field)
