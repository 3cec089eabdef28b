"""What a router accepts: the fields of both endpoints, with its own limits."""

from __future__ import annotations

from router.frontends.http import fields
from router.frontends.http.openapi.schema import (
    BOOLEAN,
    NULL,
    Schema,
    array,
    either,
    integer,
    number,
    one_of,
    optional,
    record,
    text,
)
from router.gateway import RequestGateway
from router.request.validator import MAX_PRIORITY
from router.text.contents import ROLES

TOKEN_KEY = f"^[0-9]{{1,{fields.MAX_TOKEN_DIGITS}}}$"


def request_schemas(gateway: RequestGateway) -> dict[str, Schema]:
    """Beyond what a schema can say: prompt and max_tokens together fit the context, min_tokens ≤ max_tokens,
    top_logprobs needs logprobs, best_of equals n."""
    shared = {**_sampling(gateway), **_answer(gateway), **_prompt_fields(gateway), **_not_used()}
    return {
        "CompletionRequest": _request(
            gateway,
            {
                "prompt": _prompt(gateway),
                "logprobs": optional(integer(0, gateway.config.max_logprobs)),
                **shared,
            },
            ["prompt"],
        ),
        "ChatCompletionRequest": _request(
            gateway,
            {
                "messages": array(_message(), minItems=1),
                "logprobs": optional(BOOLEAN),
                "top_logprobs": optional(
                    integer(0, gateway.config.max_logprobs, description="needs logprobs = true")
                ),
                **shared,
                "reasoning_effort": one_of(
                    [*fields.REASONING_EFFORTS, None], description="for chat templates that know it"
                ),
            },
            ["messages"],
        ),
    }


def _ignores_unknown(gateway: RequestGateway) -> bool:
    return gateway.config.unknown_fields == "ignore"


def _request(gateway: RequestGateway, properties: dict[str, Schema], required: list[str]) -> Schema:
    return {**record(properties, required), "additionalProperties": _ignores_unknown(gateway)}


def _room(gateway: RequestGateway) -> int:
    """The longest answer: to the shortest prompt."""
    return max(1, gateway.validator.max_model_len - 1)


def _token(gateway: RequestGateway) -> Schema:
    return integer(0, gateway.text.vocab_size - 1)


def _sampling(gateway: RequestGateway) -> dict[str, Schema]:
    config, room = gateway.config, _room(gateway)
    return {
        "temperature": optional(
            number(0, 100, description="below 1e-5: greedy; from there to 1e-2: as 1e-2")
        ),
        "top_k": optional(integer(-(2**31), gateway.text.vocab_size, description="0 and less = all")),
        "top_p": optional({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "min_p": optional(number(0, 1)),
        "repetition_penalty": optional({"type": "number", "exclusiveMinimum": 0, "maximum": 100}),
        "presence_penalty": optional(number(-2, 2)),
        "frequency_penalty": optional(number(-2, 2)),
        "seed": optional(integer(-(2**63), 2**64 - 1, description="drawn by the router where there is none")),
        "n": optional(integer(1, config.max_choices)),
        "best_of": optional(integer(1, config.max_choices, description="must equal n")),
        "max_tokens": optional(
            integer(1, room, description="of prompt and answer together the context is full")
        ),
        "max_completion_tokens": optional(integer(1, room, description="goes before max_tokens")),
        "min_tokens": optional(integer(0, room)),
        "stop": optional(_stop(gateway)),
        "stop_token_ids": optional(array(_token(gateway), maxItems=config.max_stop_token_ids)),
        "ignore_eos": optional(BOOLEAN),
        "logit_bias": optional(
            {
                "type": "object",
                "propertyNames": {"pattern": TOKEN_KEY},
                "additionalProperties": number(-100, 100),
                "maxProperties": config.max_logit_bias,
                "description": "token ids, as strings, to what is added to their logits",
            }
        ),
    }


def _answer(gateway: RequestGateway) -> dict[str, Schema]:
    lower = gateway.config.priority_order == "lower_first"
    return {
        "model": one_of(["", gateway.validator.served_name], description="empty = the served one"),
        "stream": optional(BOOLEAN),
        "stream_options": optional(
            {
                **record({name: optional(BOOLEAN) for name in fields.STREAM_OPTIONS}, []),
                "additionalProperties": _ignores_unknown(gateway),
                "description": "include_usage: a last chunk with the answer's usage and no choices; "
                "continuous_usage_stats: each chunk with the usage so far; changes nothing without stream",
            }
        ),
        "return_token_ids": optional(BOOLEAN),
        "include_stop_str_in_output": optional(BOOLEAN),
        "priority": either(
            integer(-MAX_PRIORITY, MAX_PRIORITY),
            one_of(list(fields.PRIORITIES)),
            NULL,
            description="a class: "
            + (
                "below 0 is high, 0 normal, above 0 batch"
                if lower
                else "above 0 is high, 0 normal, below 0 batch"
            ),
        ),
    }


def _prompt_fields(gateway: RequestGateway) -> dict[str, Schema]:
    return {
        "truncate_prompt_tokens": either(
            integer(1, gateway.validator.max_model_len),
            {"const": -1},
            NULL,
            description="keeps only this many tokens of the prompt's end; -1: as many as leave room for max_tokens",
        ),
        "cache_salt": optional(
            text(
                minLength=1,
                maxLength=fields.MAX_CACHE_SALT,
                description="cached prefixes are shared only among the tenant's requests with the same salt",
            )
        ),
        "spaces_between_special_tokens": optional(
            {**BOOLEAN, "description": "changes nothing: special tokens are never shown"}
        ),
    }


def _not_used() -> dict[str, Schema]:
    """What changes nothing, and what can't be honoured: accepted where it asks for nothing."""
    ignored: Schema = {"description": "accepted, changes nothing"}
    return {
        **dict.fromkeys(sorted(fields.HARMLESS), ignored),
        **{
            name: one_of(values, description="not supported: only these values, which ask for nothing")
            for name, values in fields.NEUTRAL.items()
        },
    }


def _stop(gateway: RequestGateway) -> Schema:
    config = gateway.config
    longest = config.max_stop_string_characters
    string = text(minLength=1, maxLength=longest)
    alone = text(maxLength=longest, description="empty = none")
    return either(alone, array(string, maxItems=config.max_stop_strings))


def _prompt(gateway: RequestGateway) -> Schema:
    tokens = array(_token(gateway), minItems=1, maxItems=_room(gateway))
    several = array(either(text(), tokens), minItems=1, maxItems=gateway.config.max_prompts)
    return either(text(), tokens, several, description="text, token ids, or several of either")


def _message() -> Schema:
    part: Schema = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": text()},
        "required": ["type", "text"],
    }
    content = either(text(), array(part))
    none = {"tool_calls": one_of([[], None]), "function_call": NULL}
    asking = [role for role in ROLES if role != "assistant"]
    return either(
        {
            "type": "object",
            "properties": {"role": one_of(asking), "content": content, **none},
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {"role": {"const": "assistant"}, "content": optional(content), **none},
            "required": ["role"],
        },
    )
