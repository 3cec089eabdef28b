"""`text.format`: what every answer must match."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator
from pydantic.json_schema import WithJsonSchema

from cluster.grammar.spec import GrammarSpec
from router.frontends.http.openai.grammar_fields import JSON_SCHEMA, plain_grammar, schema_grammar
from router.request.fields import RequestModel, wrong


class TextFormat(RequestModel):
    """A format and its grammar; `asked` is shown in the answer."""

    grammar: GrammarSpec | None
    asked: dict[str, Any]


def _format(value: object) -> TextFormat | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("must be an object")
    grammar: GrammarSpec | None
    if value.get("type") == "json_schema":
        grammar = schema_grammar({name: one for name, one in value.items() if name != "type"}, "")
    else:
        grammar = plain_grammar(value)
    for name, most in _MOST.items():
        if isinstance(given := value.get(name), str) and len(given) > most:
            raise wrong(f"its {name} has more than {most} characters", most)
    return TextFormat.model_construct(grammar=grammar, asked={k: v for k, v in value.items() if k in _SHOWN})


_SHOWN = ("type", "name", "description", "schema", "strict")  # the answer repeats them
_MOST = {"name": 64, "description": 4_096}  # characters


def _of_type(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"enum": [name]}, **properties},
        "required": ["type", *required],
        "additionalProperties": {"type": "null"},
    }


AskedFormat: TypeAlias = Annotated[
    TextFormat | None,
    PlainValidator(_format),
    WithJsonSchema(
        {
            "anyOf": [
                _of_type("text", {}, []),
                _of_type("json_object", {}, []),
                _of_type("json_schema", JSON_SCHEMA["properties"], ["schema"]),
                {"type": "null"},
            ]
        }
    ),
]
