"""Which fields of an OpenAI request are understood, which are harmless, and which are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from router.frontends.http.usage import StreamUsage
from router.request.validator import RawRequest
from router.text.contents import role_of

_SAMPLING = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "min_tokens",
}
_SHARED = _SAMPLING | {
    "model",
    "stream",
    "stream_options",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "max_tokens",
    "return_token_ids",
    "priority",
    "logprobs",
    "include_stop_str_in_output",
    "best_of",
    "cache_salt",
    "truncate_prompt_tokens",
    "max_completion_tokens",
    "spaces_between_special_tokens",
}
PRIORITIES = {"high": 1, "normal": 0, "batch": -1}
MAX_TOKEN_DIGITS = 10  # of a token id that is a key
MAX_CACHE_SALT = 256  # characters
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
COMPLETION = _SHARED | {"prompt"}
CHAT = _SHARED | {"messages", "top_logprobs", "reasoning_effort"}
# They change nothing about the answer.
HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "verbosity",
}
# Unsupported fields whose neutral value asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", None),
    "response_format": ({"type": "text"}, None),
    "echo": (False, None),
    "suffix": ("", None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "skip_special_tokens": (True, None),
    "bad_words": ([], None),
    "guided_json": (None,),
    "prompt_logprobs": (None,),
}


def check(body: Mapping[str, Any], known: set[str], *, ignore_unknown: bool = False) -> None:
    """Raise UnsupportedFieldError or InvalidRequestError naming the first field that can't be honoured.

    `ignore_unknown` accepts unknown names; values of known names are checked either way.
    """
    for name, value in body.items():
        if name in known or name in HARMLESS:
            continue
        if name in NEUTRAL:
            if not _is_one_of(value, NEUTRAL[name]):
                raise UnsupportedFieldError(f"{name}: is not supported yet", field=name)
            continue
        if not ignore_unknown:
            raise UnsupportedFieldError(f"{name}: unknown field of this request", field=name)


def check_counts(body: Mapping[str, Any], most: Mapping[str, int]) -> None:
    """Refuse lists and objects with more entries than `most` allows for their field, before any loop over them: a body
    can hold millions. Raises InvalidRequestError."""
    for name, limit in most.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            message = f"{name}: at most {limit} entries are allowed"
            raise InvalidRequestError(message, field=name, limit=str(limit))


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """As JSON compares: false is not 0."""
    return any(type(value) is type(one) and value == one for one in values)


def _bad(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", field=name)


def boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _bad(name, "must be true or false")
    return value


def stops(body: Mapping[str, Any]) -> list[str]:
    value = body.get("stop")
    if value is None or value == "":
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise _bad("stop", "must be a string or a list of strings")
    return values


def integers(body: Mapping[str, Any], name: str) -> list[int]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise _bad(name, "must be a list of whole numbers")
    return value


def bias(body: Mapping[str, Any]) -> dict[int, float]:
    value = body.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _bad("logit_bias", "must map token ids to numbers")
    if not all(key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS for key in value):
        raise _bad("logit_bias", "its keys must be token ids")
    return {int(key): weight for key, weight in value.items()}


def stream_usage(body: Mapping[str, Any], *, ignore_unknown: bool = False) -> StreamUsage:
    """Read `stream_options`; checked also without `stream`, where it has no effect."""
    options = body.get("stream_options")
    if options is None:
        return StreamUsage()
    if not isinstance(options, dict):
        raise _bad("stream_options", "must be an object")
    if set(options) - set(STREAM_OPTIONS) and not ignore_unknown:
        raise _bad("stream_options", f"may only hold {', '.join(STREAM_OPTIONS)}")
    boolean(options, "include_obfuscation")  # changes nothing
    return StreamUsage(boolean(options, "include_usage"), boolean(options, "continuous_usage_stats"))


def priority(body: Mapping[str, Any], *, lower_first: bool = False) -> Any:
    """Read `priority`: a class name, or a number whose sign names one. Above 0 is high; below 0 with `lower_first`."""
    value = body.get("priority")
    if isinstance(value, str):
        if value not in PRIORITIES:
            raise _bad("priority", f"must be a whole number or one of {', '.join(PRIORITIES)}")
        return PRIORITIES[value]
    if value is None:
        return 0
    return -value if lower_first and type(value) is int else value


def cache_salt(body: Mapping[str, Any]) -> str:
    value = body.get("cache_salt")
    if value is None:
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CACHE_SALT:
        raise _bad("cache_salt", f"must be a string of 1 … {MAX_CACHE_SALT} characters")
    return value


def truncates(body: Mapping[str, Any]) -> bool:
    return body.get("truncate_prompt_tokens") is not None


def check_truncation(body: Mapping[str, Any], context: int) -> None:
    """Before the prompt is tokenised, which may take seconds."""
    value = body.get("truncate_prompt_tokens")
    if value is not None and (type(value) is not int or not (value == -1 or 1 <= value <= context)):
        raise _bad("truncate_prompt_tokens", f"must be -1 or 1 … {context}")


def truncated(body: Mapping[str, Any], prompt: list[int], context: int, max_tokens: Any) -> list[int]:
    """The prompt's last `truncate_prompt_tokens` tokens; -1 keeps as many as leave room for max_tokens."""
    value = body.get("truncate_prompt_tokens")
    if value is None:
        return prompt
    if value == -1:
        answer = max_tokens if type(max_tokens) is int else 1
        value = max(1, context - max(1, answer))
    return prompt[-value:]


def check_best_of(body: Mapping[str, Any]) -> None:
    """Raise UnsupportedFieldError unless best_of equals n: choosing n of more candidates is not supported."""
    best_of, n = body.get("best_of"), body.get("n")
    if best_of is not None and not _is_one_of(best_of, (1 if n is None else n,)):
        raise UnsupportedFieldError("best_of: must equal n", field="best_of")


def reasoning_effort(body: Mapping[str, Any]) -> str | None:
    """Read `reasoning_effort`, which is passed to the chat template."""
    value = body.get("reasoning_effort")
    if value is not None and not _is_one_of(value, REASONING_EFFORTS):
        raise _bad("reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}")
    return None if value is None else str(value)


def asked(
    body: Mapping[str, Any],
    request_id: str,
    logprobs: int | None,
    max_tokens: Any,
    *,
    lower_first: bool = False,
) -> RawRequest:
    check_best_of(body)
    # Special tokens are never shown: there is nothing to space
    boolean(body, "spaces_between_special_tokens")
    sampling: dict[str, Any] = {name: body.get(name) for name in _SAMPLING}
    model = body.get("model", "")
    if not isinstance(model, str):
        raise _bad("model", "must be a string")
    return RawRequest(
        model=model,
        max_tokens=max_tokens,
        stop=stops(body),
        stop_token_ids=integers(body, "stop_token_ids"),
        ignore_eos=boolean(body, "ignore_eos"),
        logprobs=logprobs,
        logit_bias=bias(body),
        include_stop_text=boolean(body, "include_stop_str_in_output"),
        priority=priority(body, lower_first=lower_first),
        cache_salt=cache_salt(body),
        request_id=request_id,
        **sampling,
    )


def chat_logprobs(body: Mapping[str, Any]) -> int | None:
    top = body.get("top_logprobs")
    if top is not None and type(top) is not int:
        raise _bad("top_logprobs", "must be a whole number")
    if not boolean(body, "logprobs"):
        if top:
            raise _bad("top_logprobs", "needs logprobs = true")
        return None
    return top if top is not None else 0


def max_tokens(body: Mapping[str, Any]) -> Any:
    """The newer name goes before the older one, which must make sense all the same."""
    older, newer = body.get("max_tokens"), body.get("max_completion_tokens")
    if newer is None:
        return older
    if older is not None and (type(older) is not int or older < 1):
        raise _bad("max_tokens", "must be a whole number above 0")
    return newer


def messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Roles and texts. Content parts of type text are joined."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise _bad("messages", "must be a non-empty list")
    return [_message(one, index) for index, one in enumerate(value)]


def _message(value: Any, index: int) -> dict[str, str]:
    name = f"messages[{index}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _bad(name, "must be an object with a role")
    role = role_of(value["role"], f"{name}.role")
    if not _is_one_of(value.get("tool_calls"), ([], None)):
        raise UnsupportedFieldError(f"{name}.tool_calls: is not supported yet", field=f"{name}.tool_calls")
    if value.get("function_call") is not None:
        raise UnsupportedFieldError(
            f"{name}.function_call: is not supported yet", field=f"{name}.function_call"
        )
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": role, "content": _content(content, name)}


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _bad(f"{name}.content", "must be text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _bad(f"{name}.content", "only text parts are supported")
        texts.append(part["text"])
    return "".join(texts)
