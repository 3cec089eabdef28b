"""The schemas of `tools` and `tool_choice`, as `/openapi.json` shows them."""

from __future__ import annotations

from router.request.tools import NAME

_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "a JSON schema"},
                "strict": {"type": ["boolean", "null"], "description": "arguments always match the schema"},
            },
        },
    },
}
_NAMED_CHOICE = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_ALLOWED_CHOICE = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"enum": ["allowed_tools"]},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": _NAMED_CHOICE},
            },
        },
    },
}
TOOLS_SCHEMA = {"type": ["array", "null"], "items": _TOOL, "maxItems": {"$limit": "max_tools"}}
CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_CHOICE, _ALLOWED_CHOICE]}
