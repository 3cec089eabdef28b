"""What a router accepts: the fields of both endpoints, with its own limits."""

from __future__ import annotations

from router.front import Front
from router.http import fields
from router.http.openapi.schema import (
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
from router.tokens.contents import ROLES
from router.validate import MAX_PRIORITY

TOKEN_KEY = f"^[0-9]{{1,{fields.MAX_TOKEN_DIGITS}}}$"


def request_schemas(front: Front) -> dict[str, Schema]:
    """Beyond what a schema can say: prompt and max_tokens together fit the context, min_tokens ≤ max_tokens,
    top_logprobs needs logprobs, best_of equals n."""
    shared = {**_sampling(front), **_answer(front), **_prompt_fields(front), **_not_used()}
    return {
        "CompletionRequest": _request(
            front,
            {
                "prompt": _prompt(front),
                "logprobs": optional(integer(0, front.config.max_logprobs)),
                **shared,
            },
            ["prompt"],
        ),
        "ChatCompletionRequest": _request(
            front,
            {
                "messages": array(_message(), minItems=1),
                "logprobs": optional(BOOLEAN),
                "top_logprobs": optional(
                    integer(0, front.config.max_logprobs, description="needs logprobs = true")
                ),
                **shared,
                "reasoning_effort": one_of(
                    [*fields.REASONING_EFFORTS, None], description="for chat templates that know it"
                ),
            },
            ["messages"],
        ),
    }


def _ignores_unknown(front: Front) -> bool:
    return front.config.unknown_fields == "ignore"


def _request(front: Front, properties: dict[str, Schema], required: list[str]) -> Schema:
    return {**record(properties, required), "additionalProperties": _ignores_unknown(front)}


def _room(front: Front) -> int:
    """The longest answer: to the shortest prompt."""
    return max(1, front.validator.max_model_len - 1)


def _token(front: Front) -> Schema:
    return integer(0, front.text.vocab_size - 1)


def _sampling(front: Front) -> dict[str, Schema]:
    config, room = front.config, _room(front)
    return {
        "temperature": optional(
            number(0, 100, description="below 1e-5: greedy; from there to 1e-2: as 1e-2")
        ),
        "top_k": optional(integer(-(2**31), front.text.vocab_size, description="0 and less = all")),
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
        "stop": optional(_stop(front)),
        "stop_token_ids": optional(array(_token(front), maxItems=config.max_stop_token_ids)),
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


def _answer(front: Front) -> dict[str, Schema]:
    lower = front.config.priority_order == "lower_first"
    return {
        "model": one_of(["", front.validator.served_name], description="empty = the served one"),
        "stream": optional(BOOLEAN),
        "stream_options": optional(
            {
                **record({name: optional(BOOLEAN) for name in fields.STREAM_OPTIONS}, []),
                "additionalProperties": _ignores_unknown(front),
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


def _prompt_fields(front: Front) -> dict[str, Schema]:
    return {
        "truncate_prompt_tokens": either(
            integer(1, front.validator.max_model_len),
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


def _stop(front: Front) -> Schema:
    config = front.config
    longest = config.max_stop_string_characters
    string = text(minLength=1, maxLength=longest)
    alone = text(maxLength=longest, description="empty = none")
    return either(alone, array(string, maxItems=config.max_stop_strings))


def _prompt(front: Front) -> Schema:
    tokens = array(_token(front), minItems=1, maxItems=_room(front))
    several = array(either(text(), tokens), minItems=1, maxItems=front.config.max_prompts)
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
