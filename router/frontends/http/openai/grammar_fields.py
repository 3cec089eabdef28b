"""The fields that ask for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator
from pydantic.json_schema import WithJsonSchema

from cluster.grammar.spec import MAX_GRAMMAR_CHOICES, GrammarSpec
from router.request.fields import unsupported, wrong
from router.request.grammar.requested import ANY_OBJECT, choice_spec, json_spec, lark_spec, text_spec

_Make = Callable[[Any], GrammarSpec]
_MAKERS: Mapping[str, _Make] = {
    "json": json_spec,
    "regex": lambda value: text_spec("regex", value),
    "choice": choice_spec,
    "grammar": lark_spec,
}
_OTHER_FIELDS = "has other fields than those of its type"
_TEXT = {"type": "string", "minLength": 1}
# Of vLLM's: JSON of the other kinds is always compact, and there is one library that makes grammars
_OPTIONS = ("disable_any_whitespace", "disable_fallback")
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "json": {"type": ["object", "boolean", "string"], "description": "a JSON schema, or its text"},
    "regex": {**_TEXT, "description": "for the whole answer"},
    "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_GRAMMAR_CHOICES},
    "grammar": {**_TEXT, "description": "in Lark's syntax"},
}


def _made(make: _Make, value: Any, prefix: str = "") -> GrammarSpec:
    try:
        return make(value)
    except ValueError as error:
        raise wrong(prefix + str(error)) from None


def _response_format(value: object) -> GrammarSpec | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("must be an object")
    if value.get("type") != "json_schema":
        return plain_grammar(value)
    given = _given(value)
    if "json_schema" not in given:
        raise wrong("json_schema is missing")
    if given != {"type", "json_schema"}:
        raise wrong(_OTHER_FIELDS)
    return schema_grammar(value["json_schema"], "json_schema")


def _given(value: Mapping[str, Any]) -> set[str]:
    """The fields that are not null: clients that write out a whole model send the others too, as vLLM's do."""
    return {name for name, one in value.items() if one is not None}


def plain_grammar(value: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar of a format without a schema; None: of text."""
    match value.get("type"):
        case "text" if _given(value) == {"type"}:
            return None
        case "json_object" if _given(value) == {"type"}:
            return ANY_OBJECT
        case "text" | "json_object":
            raise wrong(_OTHER_FIELDS)
    raise unsupported("its type must be text, json_object or json_schema")


def schema_grammar(value: object, name: str) -> GrammarSpec:
    """The grammar of a schema in OpenAI's object of that name. `strict` changes nothing: answers always match."""
    if not isinstance(value, dict):
        raise wrong(f"{name} must be an object")
    inner = f"{name}." if name else ""
    if unknown := _given(value) - {"name", "description", "schema", "strict"}:
        raise wrong(f"{name or 'it'} has an unknown field: {min(unknown)[:80]}")
    for text in ("name", "description"):
        if not isinstance(value.get(text), str | None):
            raise wrong(f"{inner}{text} must be a string")
    if not isinstance(value.get("strict"), bool | None):
        raise wrong(f"{inner}strict must be true or false")
    if not isinstance(value.get("schema"), dict):
        raise wrong(f"{inner}schema must be an object")
    return _made(json_spec, value["schema"], f"{inner}schema ")


def _structured_outputs(value: object) -> GrammarSpec | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("must be an object")
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    for option in _OPTIONS:
        if given.pop(option, True) is not True:
            raise wrong(f"{option} must be true or false")
    if unknown := given.keys() - {*_MAKERS, "json_object"}:
        raise unsupported(f"{min(unknown)[:80]} is not supported")
    if len(given) != 1:
        raise wrong("must have one of json, regex, choice, grammar and json_object")
    ((name, one),) = given.items()
    if name == "json_object":
        if one is not True:
            raise wrong("json_object must be true or false")
        return ANY_OBJECT
    spec = _made(_MAKERS[name], one, f"{name} ")
    if value.get("disable_any_whitespace") and spec.kind == "lark" and "%json" in spec.text:
        raise unsupported(
            "disable_any_whitespace is not supported with %json in a grammar, whose JSON may have some"
        )
    return spec


def _guided(name: str) -> Any:
    def check(value: object) -> GrammarSpec | None:
        return None if value is None else _made(_MAKERS[name], value)

    schema = {"anyOf": [_SCHEMAS[name], {"type": "null"}]}
    return Annotated[GrammarSpec | None, PlainValidator(check), WithJsonSchema(schema)]


_NULL = {"type": "null"}


def _record(properties: dict[str, Any], required: list[str], others: Any = _NULL) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": others,
    }


def _of_type(name: str, **more: Any) -> dict[str, Any]:
    return _record({"type": {"enum": [name]}, **more}, ["type", *more])


JSON_SCHEMA = _record(
    {
        "name": {"type": ["string", "null"]},
        "description": {"type": ["string", "null"]},
        "schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"], "description": "changes nothing: answers always match"},
    },
    ["schema"],
)
_NEUTRAL = {"enum": [None, False]}
_FLAGS = {name: {"type": ["boolean", "null"], "description": "holds anyway"} for name in _OPTIONS}
ResponseFormat: TypeAlias = Annotated[
    GrammarSpec | None,
    PlainValidator(_response_format),
    WithJsonSchema(
        {
            "anyOf": [
                _of_type("text"),
                _of_type("json_object"),
                _of_type("json_schema", json_schema=JSON_SCHEMA),
                {"type": "null"},
            ]
        }
    ),
]
StructuredOutputs: TypeAlias = Annotated[
    GrammarSpec | None,
    PlainValidator(_structured_outputs),
    WithJsonSchema(
        {
            "anyOf": [
                *(_record({name: schema, **_FLAGS}, [name], _NEUTRAL) for name, schema in _SCHEMAS.items()),
                _record({"json_object": {"enum": [True]}, **_FLAGS}, ["json_object"], _NEUTRAL),
                {"type": "null"},
            ]
        }
    ),
]
GuidedJson: TypeAlias = _guided("json")  # type: ignore[valid-type]
GuidedRegex: TypeAlias = _guided("regex")  # type: ignore[valid-type]
GuidedChoice: TypeAlias = _guided("choice")  # type: ignore[valid-type]
GuidedGrammar: TypeAlias = _guided("grammar")  # type: ignore[valid-type]
