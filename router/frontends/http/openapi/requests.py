"""The schemas of requests, from their models, with this router's limits."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from router.frontends.http.openapi.schema import Schema, optional
from router.frontends.http.requests import ChatCompletionRequest, CompletionRequest
from router.request.fields import filled
from router.request.limits import FieldLimits


class _Generator(GenerateJsonSchema):
    """Fields have no titles, and no defaults: a model's generation_config.json may set others."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return optional(self.generate_inner(schema["schema"]))


def request_schemas(limits: FieldLimits) -> dict[str, Schema]:
    """Both endpoints' requests and the objects in them, by name."""
    _, schemas = models_json_schema(
        [(ChatCompletionRequest, "validation"), (CompletionRequest, "validation")],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Generator,
    )
    made: dict[str, Schema] = filled(schemas["$defs"], limits)
    return made
