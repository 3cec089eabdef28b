"""The options of a generation that both frontends take, each with its bounds and its default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo
from pydantic.json_schema import WithJsonSchema

from router.request.fields import AtMost, Length, RequestModel, Within, late, limits_of, shown, wrong
from router.request.grammar.requested import RequestedGrammar

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
REASONING_EFFORTS: tuple[str, ...] = get_args(ReasoningEffort)

MAX_PRIORITY = 2**15
# A token id that is a key, as JSON writes numbers: with two spellings, two keys could name one token
TOKEN_KEY = "^(0|[1-9][0-9]{0,9})$"
_TOKEN_KEY = re.compile(TOKEN_KEY)

_TEMPLATE_EFFORTS = {"max": "xhigh"}  # the names of chat templates, where they differ

Flag: TypeAlias = bool | None  # null is false
TokenId: TypeAlias = Annotated[int, late(minimum=0, maximum="last_token")]
LogprobCount: TypeAlias = Annotated[int, late(minimum=0, maximum="max_logprobs")]
Priority: TypeAlias = Annotated[int, Within(-MAX_PRIORITY, MAX_PRIORITY)]
AnswerTokens: TypeAlias = Annotated[int, late(minimum=1, maximum="room")]


def template_effort(effort: str | None) -> str | None:
    """The name of a reasoning effort in chat templates."""
    return None if effort is None else _TEMPLATE_EFFORTS.get(effort, effort)


def _token_key(key: object) -> object:
    """A key of a JSON object; a map of a gRPC message has numbers."""
    if not isinstance(key, str):
        return key
    if _TOKEN_KEY.fullmatch(key) is None:
        raise wrong(f"{shown(key)} is not a token id; use at most 10 digits, without leading zeros")
    return int(key)


def _truncation(value: object, info: ValidationInfo) -> int | None:
    context = limits_of(info).max_model_len
    if value is None or (type(value) is int and (value == -1 or 1 <= value <= context)):
        return value
    raise wrong(f"must be -1 or 1 … {context}")


def _one_or_many(value: object) -> object:
    if isinstance(value, str):
        return [value] if value else []
    if value is not None and not isinstance(value, Sequence):
        raise wrong("must be a string or a list of strings")
    return value


TruncatePromptTokens: TypeAlias = Annotated[
    int | None,
    PlainValidator(
        _truncation, Annotated[int, late(minimum=1, maximum="max_model_len")] | Literal[-1] | None
    ),
]
TokenKey: TypeAlias = Annotated[
    int, BeforeValidator(_token_key), WithJsonSchema({"type": "string", "pattern": TOKEN_KEY})
]
StopStrings: TypeAlias = Annotated[
    list[Annotated[str, Length(1, "max_stop_string_characters")]], AtMost("max_stop_strings")
]
StopText: TypeAlias = Annotated[
    str, late(maxLength="max_stop_string_characters"), Field(description="empty = none")
]


class GenerationOptions(RequestModel):
    """`GenerateOptions` of proto/wire/inference.proto, and the base of HTTP's requests.

    Fields with a default take the one of the model's generation_config.json before their own.
    """

    n: Annotated[int, Within(1, "max_choices")] | None = None
    temperature: Annotated[float, Within(0.0, 100.0)] | None = Field(
        1.0, description="below 1e-5: greedy; from there to 1e-2: as 1e-2"
    )
    top_k: Annotated[int, Within(-(2**31), 2**32 - 1)] | None = Field(
        0, description="0 and less, and as many as the vocabulary has or more = all"
    )
    top_p: Annotated[float, Within(0.0, 1.0, above=True)] | None = 1.0
    min_p: Annotated[float, Within(0.0, 1.0)] | None = 0.0
    repetition_penalty: Annotated[float, Within(0.0, 100.0, above=True)] | None = 1.0
    presence_penalty: Annotated[float, Within(-2.0, 2.0)] | None = 0.0
    frequency_penalty: Annotated[float, Within(-2.0, 2.0)] | None = 0.0
    seed: Annotated[int, Within(-(2**63), 2**64 - 1)] | None = Field(
        None, description="drawn by the router where there is none"
    )
    max_tokens: AnswerTokens | None = Field(
        None, description="of an answer; default: as many as the context leaves"
    )
    min_tokens: Annotated[int, late(minimum=0, maximum="room")] | None = None
    stop: Annotated[StopStrings | None, BeforeValidator(_one_or_many, StopText | StopStrings | None)] = None
    stop_token_ids: Annotated[list[TokenId], AtMost("max_stop_token_ids")] | None = None
    ignore_eos: Flag = None
    logit_bias: (
        Annotated[dict[TokenKey, Annotated[float, Within(-100.0, 100.0)]], AtMost("max_logit_bias")] | None
    ) = Field(None, description="token ids, as strings, to what is added to their logits")
    logprobs: LogprobCount | None = None
    include_stop_text: Flag = None
    priority: Priority | None = None

    @property
    def asked_grammar(self) -> RequestedGrammar | None:
        """The grammar that every answer must match; None: there is none."""
        return None

    @property
    def allowed_ids(self) -> Sequence[int] | None:
        """The only tokens that answers may have; None: they may have any."""
        return None

    @property
    def excluded_words(self) -> Sequence[str]:
        """Texts whose tokens answers may not have."""
        return ()

    @property
    def echoes(self) -> bool:
        """Whether the prompt precedes the answer of every choice."""
        return False

    @property
    def token_limit(self) -> int | None:
        """The longest answer; None = what the context leaves."""
        return self.max_tokens

    @property
    def fewest_tokens(self) -> int:
        """The least `token_limit` that may be asked for; 0: then the prompt alone is computed."""
        return 0 if self.echoes else 1

    @property
    def alternatives_field(self) -> str:
        """Names `alternatives` in errors."""
        return "logprobs"

    @property
    def alternatives(self) -> int | None:
        """Tokens whose log probabilities are reported beside the chosen one's; None = no log probabilities."""
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        """The same for the prompt's tokens."""
        return None


DEFAULTS: Mapping[str, Any] = {
    name: field.default for name, field in GenerationOptions.model_fields.items() if field.default is not None
}
