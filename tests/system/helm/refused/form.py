"""The form of refusals: values, what the message says is wrong, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Refusals: TypeAlias = Mapping[str, tuple[dict[str, Any], str, str]]
