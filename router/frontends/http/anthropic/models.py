"""The models as Anthropic's clients list them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

VERSION_HEADER = "anthropic-version"  # a header that these clients always send


def asks_as_anthropic(request: Request) -> bool:
    """Whether a request for a path that clients of both kinds use is one of Anthropic's."""
    return VERSION_HEADER in request.headers


def lists_models_as_anthropic(scope: Scope) -> bool:
    """Whether it asks for models, and its client is Anthropic's: errors have that form, too."""
    names = (name for name, _ in scope["headers"])
    return scope["path"].startswith("/v1/models") and VERSION_HEADER.encode() in names


def shown_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """`model`: as OpenAI's clients get it."""
    own = {key: value for key, value in model.items() if key not in ("object", "created", "owned_by")}
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = {"type": "model", "display_name": model["id"], "created_at": created}
    return {**fields, "max_input_tokens": model["max_model_len"], **own}


def shown_list(models: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All of them on one page, whatever `limit` says."""
    data = [shown_model(one) for one in models]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
