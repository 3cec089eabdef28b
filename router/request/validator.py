"""One place that decides what is a valid request, for both doors: names the field and the limit."""

from __future__ import annotations

import math
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config.router import RouterConfig
from cluster.errors import ContextLengthError, InvalidRequestError, ModelError, UnknownModelError
from router.request.completion import Completion
from router.text.tokenizer import ModelText
from wire import common_pb2

MAX_PRIORITY = 2**15
MAX_REQUEST_ID = 256  # characters: it goes into logs, headers and errors
# The least normal float of 32 bits: smaller values arrive over gRPC as 0, which there means "not set"
LEAST_POSITIVE = 2.0**-126
# Of a message: a token id in a packed list, prompt and resumed ones; and everything that is neither text nor token ids.
TOKEN_ID_BYTES = 2 * 5
OTHER_BYTES = 1 << 20

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200


def shown(value: Any) -> str:
    """`repr` of a value that may be of any type and size, cut."""
    return _SHOWN.repr(value)


@dataclass
class RawRequest:
    """What a client asked for, before validation. None = not given."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    include_stop_text: bool = False
    priority: int = 0
    cache_salt: str = ""
    request_id: str = ""
    resume_tokens: Sequence[int] = ()
    resume_ticket: bytes = b""
    reconnects: int = 0
    explain: bool = False
    deadline_seconds: float | None = None
    prompts: int = 1  # of the whole request, which share max_answer_entries


def _refuse(name: str, message: str, limit: object = "") -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", field=name, limit=str(limit))


class Validator:
    def __init__(self, config: RouterConfig, text: ModelText):
        self._config = config
        self._text = text
        self.served_name = config.served_model_name or config.model.name
        own = text.max_position_embeddings
        self.max_model_len = min(config.max_model_len or own, own)
        self._check_defaults()

    def _check_defaults(self) -> None:
        """Raises ModelError: what the model's own file says wrongly must not look like a client's fault later."""
        try:
            self._sampling(RawRequest(), 0, 1)
        except InvalidRequestError as error:
            raise ModelError(f"generation_config.json: {error.message}", field=error.field) from error

    def completion(self, prompt: Sequence[int], asked: RawRequest) -> Completion:
        """Raises InvalidRequestError, UnknownModelError or ContextLengthError."""
        if asked.model and asked.model != self.served_name:
            raise UnknownModelError(
                f"model: {shown(asked.model)} is not served here; {self.served_name!r} is",
                field="model",
            )
        self.check_lengths(len(prompt), len(asked.resume_tokens))
        tokens = self._tokens("prompt", prompt)
        if not tokens:
            raise _refuse("prompt", "is empty; at least one token is needed", 1)
        resumed = self._tokens("resume_tokens", asked.resume_tokens)
        n = self._integer("n", asked.n, 1, 1, self._config.max_choices)
        if resumed and n > 1:
            raise _refuse("resume_tokens", "a resumed request has one choice", "n = 1")
        sampling = self._sampling(asked, len(tokens), n)
        if resumed and len(resumed) >= sampling.max_tokens:
            raise _refuse(
                "resume_tokens",
                f"{len(resumed)} tokens leave none of max_tokens = {sampling.max_tokens} to generate",
                f"< max_tokens = {sampling.max_tokens}",
            )
        return Completion(
            request_id=self._request_id(asked.request_id),
            model=self.served_name,
            prompt_tokens=tokens,
            sampling=sampling,
            n=n,
            stop=self._stops(asked.stop),
            include_stop_text=asked.include_stop_text,
            priority=self._integer("priority", asked.priority, 0, -MAX_PRIORITY, MAX_PRIORITY),
            cache_salt=asked.cache_salt,
            resume_tokens=resumed,
            resume_ticket=asked.resume_ticket,
            reconnects=asked.reconnects,
            explain=asked.explain,
            deadline_seconds=min(
                self._config.request_seconds, asked.deadline_seconds or self._config.request_seconds
            ),
        )

    def check_lengths(self, prompt_tokens: int, resume_tokens: int = 0) -> None:
        """Check counts before anything iterates over the tokens: one may hold millions. Raises ContextLengthError."""
        for name, tokens in (("prompt", prompt_tokens), ("resume_tokens", prompt_tokens + resume_tokens)):
            if tokens >= self.max_model_len:
                raise ContextLengthError(
                    f"{name}: {tokens} tokens leave no room in a context of {self.max_model_len}",
                    field=name,
                    limit=str(self.max_model_len),
                )

    def check_text(self, text: str, *, truncated: bool = False) -> None:
        """Refuse a text before it is tokenised: one that cannot fit the context, unless it is to be `truncated`, and one
        above `max_text_bytes`. Raises ContextLengthError, InvalidRequestError."""
        fits = None if truncated else self._most_text_bytes
        allowed = self._config.max_text_bytes
        most = allowed if fits is None else min(fits, allowed)
        if 4 * len(text) <= most:
            return
        size = len(text)  # each character is a byte at least: no copy is made of a text that is far too long
        if size <= most:
            size = len(text.encode(errors="surrogatepass"))
        if fits is not None and size > fits:
            raise self._too_long("prompt", size)
        if size > allowed:
            message = f"prompt: {size} bytes of text; max_text_bytes is {allowed}"
            raise InvalidRequestError(message, field="prompt", limit=str(allowed))

    def check_message(self, size: int) -> None:
        """Refuse a message of so many bytes, before it is parsed, if no request that fits the context is as long.

        Raises ContextLengthError.
        """
        most = self._most_text_bytes
        if most is not None and size > max(most, TOKEN_ID_BYTES * self.max_model_len) + OTHER_BYTES:
            raise self._too_long("message", size)

    @property
    def _most_text_bytes(self) -> int | None:
        """Of a text that fits the context; None = no bound."""
        longest = self._text.most_bytes
        return None if longest is None else longest * (self.max_model_len - 1)

    def _too_long(self, what: str, size: int) -> ContextLengthError:
        return ContextLengthError(
            f"{what}: {size} bytes exceed a context of {self.max_model_len} tokens of at most "
            f"{self._text.most_bytes} bytes each",
            field=what,
            limit=str(self.max_model_len),
        )

    def check_messages(self, count: int) -> None:
        """Refuse more messages than the context has tokens, before they are rendered: each takes at least one token.

        Raises ContextLengthError.
        """
        if count >= self.max_model_len:
            raise ContextLengthError(
                f"messages: {count} messages do not fit a context of {self.max_model_len} tokens",
                field="messages",
                limit=str(self.max_model_len),
            )

    @staticmethod
    def _request_id(given: str) -> str:
        if len(given) > MAX_REQUEST_ID or not given.isprintable():
            raise _refuse("request_id", f"at most {MAX_REQUEST_ID} printable characters", MAX_REQUEST_ID)
        return given or f"req-{secrets.token_hex(12)}"

    def _tokens(self, name: str, ids: Sequence[int]) -> list[int]:
        vocab = self._text.vocab_size
        tokens = list(ids)
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            raise _refuse(name, f"token ids must lie in 0 … {vocab - 1}", vocab - 1)
        return tokens

    def _sampling(self, asked: RawRequest, prompt: int, n: int) -> common_pb2.SamplingParams:
        defaults = self._text.generation
        vocab = self._text.vocab_size

        def number(name: str, default: float, low: float, high: float) -> float:
            given = getattr(asked, name)
            if given is None:
                given = defaults.get(name)
            return self._number(name, default if given is None else given, low, high)

        most = self._config.max_stop_token_ids
        if len(asked.stop_token_ids) > most:
            raise _refuse("stop_token_ids", f"at most {most} are allowed", most)
        stop_ids = self._tokens("stop_token_ids", asked.stop_token_ids)
        top_logprobs = self._integer("logprobs", asked.logprobs, 0, 0, self._config.max_logprobs)
        max_tokens = self._max_tokens(asked, prompt, asked.prompts * n * (1 + top_logprobs))
        seed = self._integer("seed", asked.seed, secrets.randbits(63), -(2**63), 2**64 - 1)
        return common_pb2.SamplingParams(
            temperature=number("temperature", 1.0, 0.0, 100.0),
            top_k=self._top_k(asked.top_k, defaults.get("top_k"), vocab),
            top_p=self._positive("top_p", number("top_p", 1.0, 0.0, 1.0)),
            min_p=number("min_p", 0.0, 0.0, 1.0),
            repetition_penalty=self._positive(
                "repetition_penalty", number("repetition_penalty", 1.0, 0.0, 100.0)
            ),
            presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
            frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
            seed=seed % 2**64,
            max_tokens=max_tokens,
            min_tokens=self._integer("min_tokens", asked.min_tokens, 0, 0, max_tokens),
            ignore_eos=asked.ignore_eos,
            stop_token_ids=stop_ids,
            logit_bias=self._bias(asked.logit_bias),
            logprobs=asked.logprobs is not None,
            top_logprobs=top_logprobs,
        )

    def _top_k(self, asked: int | None, default: Any, vocab: int) -> int:
        """0 and less = all, as vLLM has it."""
        return max(0, self._integer("top_k", default if asked is None else asked, 0, -(2**31), vocab))

    def _max_tokens(self, asked: RawRequest, prompt: int, entries: int) -> int:
        """`entries`: what one token of each choice adds to the answer."""
        room = self.max_model_len - prompt
        most = self._config.max_answer_entries // entries
        if asked.max_tokens is None and most:
            return min(room, most)
        wanted = self._integer("max_tokens", asked.max_tokens, 1, 1, 2**31)
        if wanted > room:
            raise ContextLengthError(
                f"max_tokens: {prompt} prompt tokens + {wanted} new ones exceed the context of "
                f"{self.max_model_len}",
                field="max_tokens",
                limit=str(self.max_model_len),
            )
        if wanted > most:
            limit = self._config.max_answer_entries
            raise _refuse("max_tokens", f"prompts x n x max_tokens x (1 + logprobs) exceeds {limit}", limit)
        return wanted

    def _bias(self, given: Mapping[int, float]) -> dict[int, float]:
        most = self._config.max_logit_bias
        if len(given) > most:
            raise _refuse("logit_bias", f"at most {most} entries are allowed", most)
        self._tokens("logit_bias", list(given))
        return {key: self._number("logit_bias", value, -100.0, 100.0) for key, value in given.items()}

    def _stops(self, stops: Sequence[str]) -> tuple[str, ...]:
        if len(stops) > self._config.max_stop_strings:
            raise _refuse("stop", f"at most {self._config.max_stop_strings}", self._config.max_stop_strings)
        longest = self._config.max_stop_string_characters
        if any(not stop or len(stop) > longest for stop in stops):
            raise _refuse("stop", f"each must have 1 … {longest} characters", longest)
        return tuple(stops)

    @staticmethod
    def _number(name: str, value: Any, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refuse(name, f"{shown(value)} is not a number", f"{low} … {high}")
        if not low <= value <= high:
            raise _refuse(name, f"{value} is outside {low} … {high}", f"{low} … {high}")
        return float(value)

    @staticmethod
    def _positive(name: str, value: float) -> float:
        if value == 0.0:
            raise _refuse(name, "must be greater than 0", "> 0")
        return max(value, LEAST_POSITIVE)

    @staticmethod
    def _integer(name: str, value: Any, default: int, low: int, high: int) -> int:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(name, f"{shown(value)} is not a whole number", f"{low} … {high}")
        if not low <= value <= high:
            raise _refuse(name, f"{value} is outside {low} … {high}", f"{low} … {high}")
        return value
