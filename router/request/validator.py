"""Checks of a whole request, for both frontends: those that its fields alone do not decide."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config.router import RouterConfig
from cluster.errors import ContextLengthError, InvalidRequestError, ModelError, UnsupportedFieldError
from cluster.protocol.pooling import Embedding
from router.request.adapters import Adapters, no_adapters
from router.request.answer_plan import AnswerPlan
from router.request.completion import Completion
from router.request.fields import range_error, read, refuse
from router.request.limits import FieldLimits
from router.request.options import DEFAULTS, GenerationOptions
from router.request.token_options import NO_EXCLUSIONS, Exclusions
from router.text.tokenizer import ModelText
from wire import common_pb2

MAX_REQUEST_ID = 256  # characters: it goes into logs, headers and errors
# Of a message: a token id in a packed list, prompt and resumed ones; and everything that is neither text nor token ids.
TOKEN_ID_BYTES = 2 * 5
OTHER_BYTES = 1 << 20


@dataclass(frozen=True)
class Envelope:
    """Fields of a request beside its prompt and options."""

    request_id: str = ""
    model: str = ""  # as asked: "" is the served one
    cache_salt: str = ""
    resume_tokens: Sequence[int] = ()
    resume_ticket: bytes = b""
    reconnects: int = 0
    explain: bool = False
    deadline_seconds: float | None = None
    prompts: int = 1  # of the whole request, which share max_answer_entries
    exclusions: Exclusions = NO_EXCLUSIONS  # by its options, with the tokens of its bad_words


class Validator:
    def __init__(self, config: RouterConfig, text: ModelText, adapters: Adapters = no_adapters):
        self._config = config
        self._text = text
        self.limits = FieldLimits.of(config, text, adapters)
        defaults = self._read_defaults(text.generation)
        self._defaults = {name: getattr(defaults, name) for name in DEFAULTS}

    def _read_defaults(self, generation: dict[str, Any]) -> GenerationOptions:
        """Raises ModelError if they are wrong: later the error would blame a client's request."""
        given = {name: generation[name] for name in DEFAULTS if generation.get(name) is not None}
        try:
            return read(GenerationOptions, given, self.limits)
        except InvalidRequestError as error:
            raise ModelError(f"generation_config.json: {error.message}", field=error.field) from error

    def completion(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        envelope: Envelope,
        plan: AnswerPlan | None = None,
        field: str = "prompt",
    ) -> Completion:
        """`plan`: of a conversation; `field`: the client's, of the prompt.

        Raises InvalidRequestError or ContextLengthError.
        """
        if not self._text.has_head:
            raise UnsupportedFieldError(
                f"model: {self.limits.served_model} is a base model, without an output head: it generates nothing",
                field="model",
            )
        self.limits.check_lengths(len(prompt), len(envelope.resume_tokens), field=field)
        tokens = self._tokens(field, prompt)
        if not tokens:
            raise refuse(field, "is empty; at least one token is needed", 1)
        resumed = self._tokens("resume_tokens", envelope.resume_tokens)
        n = options.n or 1
        if resumed and n > 1:
            raise refuse("resume_tokens", "a resumed request has one choice", "n = 1")
        sampling = self._sampling(options, len(tokens), envelope.prompts * n, envelope.exclusions)
        if resumed and len(resumed) >= sampling.max_tokens:
            raise refuse(
                "resume_tokens",
                f"{len(resumed)} tokens leave none of max_tokens = {sampling.max_tokens} to generate",
                f"< max_tokens = {sampling.max_tokens}",
            )
        prompt_only = not sampling.max_tokens
        if prompt_only:
            sampling = _for_prompt_only(sampling)
        plan = plan or AnswerPlan(grammar=options.asked_grammar)
        grammar = plan.grammar
        if grammar is not None:
            for name in ("stop", "stop_token_ids"):
                if getattr(options, name):
                    raise UnsupportedFieldError(
                        f"{name}: not with {grammar.field}: it could end an answer that does not match yet",
                        field=name,
                    )
        return Completion(
            **self._common(envelope),
            prompt_tokens=tokens,
            sampling=sampling,
            grammar=None if grammar is None or prompt_only else grammar.spec.to_wire(),
            answer_format=None if prompt_only else plan.format,
            n=n,
            prompt_only=prompt_only,
            stop=() if prompt_only else tuple(options.stop or ()),
            include_stop_text=bool(options.include_stop_text),
            priority=options.priority or 0,
            resume_tokens=resumed,
            resume_ticket=envelope.resume_ticket,
            reconnects=envelope.reconnects,
        )

    def embedding(
        self,
        prompt: Sequence[int],
        how: Embedding,
        envelope: Envelope,
        priority: int = 0,
        field: str = "input",
    ) -> Completion:
        """The request for the embedding of one input, which is the client's `field`. Raises InvalidRequestError or
        ContextLengthError."""
        longest, setting = self.longest_input(how)
        if len(prompt) > longest:
            raise ContextLengthError(
                f"{field}: {len(prompt)} tokens exceed the {longest} of {setting}",
                field=field,
                limit=str(longest),
            )
        if not prompt:
            raise refuse(field, "is empty; at least one token is needed", 1)
        return Completion(
            **self._common(envelope),
            prompt_tokens=self._tokens(field, prompt),
            sampling=common_pb2.SamplingParams(
                max_tokens=1, ignore_eos=True, pooling=common_pb2.Pooling.ValueType(how.pooling)
            ),
            prompt_only=True,
            embedding_dimensions=how.dimensions,
            priority=priority,
        )

    def longest_input(self, how: Embedding) -> tuple[int, str]:
        """Tokens of the longest text that is embedded, and what bounds it. One token of the context is left: workers draw
        one, which ends the attempt."""
        context = self.limits.max_model_len - 1
        if how.max_tokens is None or how.max_tokens > context:
            return context, "max_model_len - 1"
        return how.max_tokens, "max_seq_length"

    def check_embeddings(self, inputs: int, how: Embedding, field: str) -> None:
        """Bound the vectors of one request, whose last inputs are the client's `field`. Raises InvalidRequestError."""
        most = self._config.max_answer_entries
        if inputs * how.dimensions > most:
            raise refuse(
                field,
                f"{inputs} inputs x {how.dimensions} dimensions exceed {most} (max_answer_entries)",
                most,
            )

    def _common(self, envelope: Envelope) -> dict[str, Any]:
        """The fields that requests of each kind have. Raises InvalidRequestError."""
        adapter, longest = self.limits.adapter_of(envelope.model), self._config.request_seconds
        return {
            "request_id": self._request_id(envelope.request_id),
            "model": envelope.model if adapter else self.limits.served_model,
            "adapter": adapter,
            "served_model": self.limits.served_model,
            "cache_salt": envelope.cache_salt,
            "explain": envelope.explain,
            "deadline_seconds": min(longest, envelope.deadline_seconds or longest),
        }

    def check_text(self, text: str, *, truncated: bool = False, field: str = "prompt") -> None:
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
        self._check_size(size, fits, field)

    def check_contents(self, size: int, *, truncated: bool = False, field: str = "messages") -> None:
        """Refuse messages whose texts have so many characters, before they are rendered, if they exceed `max_text_bytes`.
        Whether they fit the context is checked later: templates leave out earlier reasoning.

        Raises ContextLengthError, InvalidRequestError.
        """
        if size > self._config.max_text_bytes:
            self._check_size(size, None if truncated else self._most_text_bytes, field)

    def _check_size(self, size: int, fits: int | None, field: str) -> None:
        allowed = self._config.max_text_bytes
        if fits is not None and size > fits:
            raise self._too_long(field, size)
        if size > allowed:
            raise refuse(field, f"{size} bytes of text; max_text_bytes is {allowed}", allowed)

    def check_message(self, size: int) -> None:
        """Refuse a message of so many bytes, before it is parsed, if no request that fits the context is as long.

        Raises ContextLengthError.
        """
        if not self.takes_message(size):
            raise self._too_long("message", size)

    def takes_message(self, size: int) -> bool:
        """Whether a request that fits the context can be as long."""
        most = self._most_text_bytes
        return most is None or size <= max(most, TOKEN_ID_BYTES * self.limits.max_model_len) + OTHER_BYTES

    @property
    def _most_text_bytes(self) -> int | None:
        """Bytes of the longest text that fits the context; None = no bound."""
        longest = self._text.most_bytes
        return None if longest is None else longest * (self.limits.max_model_len - 1)

    def _too_long(self, what: str, size: int) -> ContextLengthError:
        return ContextLengthError(
            f"{what}: {size} bytes exceed a context of {self.limits.max_model_len} tokens of at most "
            f"{self._text.most_bytes} bytes each",
            field=what,
            limit=str(self.limits.max_model_len),
        )

    @staticmethod
    def _request_id(given: str) -> str:
        if len(given) > MAX_REQUEST_ID or not given.isprintable():
            raise refuse("request_id", f"at most {MAX_REQUEST_ID} printable characters", MAX_REQUEST_ID)
        return given or f"req-{secrets.token_hex(12)}"

    def _tokens(self, name: str, ids: Iterable[int] | None) -> list[int]:
        tokens, last = list(ids or ()), self.limits.last_token
        if tokens and not (min(tokens) >= 0 and max(tokens) <= last):
            raise refuse(name, f"token ids must lie in 0 … {last}", last)
        return tokens

    def _sampling(
        self, options: GenerationOptions, prompt: int, choices: int, exclusions: Exclusions
    ) -> common_pb2.SamplingParams:
        """`choices`: of all the request's prompts."""
        most = self._config.max_logprobs
        alternatives = self._whole_number(options.alternatives_field, options.alternatives, 0, 0, most)
        of_prompt = options.prompt_alternatives
        top = self._whole_number("prompt_logprobs", of_prompt, 0, 0, most)
        max_tokens = self._max_tokens(options, prompt, choices * (1 + max(alternatives, top)))
        seed = secrets.randbits(63) if options.seed is None else options.seed
        self._tokens("logit_bias", options.logit_bias)
        return common_pb2.SamplingParams(
            **self._plain(options),
            seed=seed % 2**64,
            max_tokens=max_tokens,
            min_tokens=self._whole_number("min_tokens", options.min_tokens, 0, 0, max_tokens),
            ignore_eos=bool(options.ignore_eos),
            stop_token_ids=self._tokens("stop_token_ids", options.stop_token_ids),
            logit_bias=options.logit_bias,
            allowed_tokens=exclusions.allowed_tokens,
            bad_words=exclusions.bad_words,
            logprobs=options.alternatives is not None,
            top_logprobs=alternatives,
            prompt_logprobs=of_prompt is not None,
            prompt_top_logprobs=top,
        )

    def _plain(self, options: GenerationOptions) -> dict[str, Any]:
        """The options that workers get as they are, or their defaults."""
        values = self._defaults.copy()
        for name in options.model_fields_set & values.keys():
            if (given := getattr(options, name)) is not None:
                values[name] = given
        if not 0 < values["top_k"] < self.limits.vocab_size:
            values["top_k"] = 0  # all, as vLLM has it
        return values

    def _max_tokens(self, options: GenerationOptions, prompt: int, entries: int) -> int:
        """`entries`: what one token of each choice adds to the answer. A prompt that is shown is part of
        it."""
        shown = options.echoes or options.prompt_alternatives is not None
        given, echoed = options.token_limit, prompt if shown else 0
        room = self.limits.max_model_len - prompt
        most = max(0, self._config.max_answer_entries // entries - echoed)
        if given is None and most:
            return min(room, most)
        wanted = self._whole_number("max_tokens", given, 1, options.fewest_tokens, 2**31)
        if wanted > room:
            raise ContextLengthError(
                f"max_tokens: {prompt} prompt tokens + {wanted} new ones exceed the context of "
                f"{self.limits.max_model_len}",
                field="max_tokens",
                limit=str(self.limits.max_model_len),
            )
        limit = self._config.max_answer_entries
        if entries * (wanted + echoed) > limit:
            tokens = "(prompt tokens + max_tokens)" if echoed else "max_tokens"
            raise refuse("max_tokens", f"prompts x n x {tokens} x (1 + logprobs) exceeds {limit}", limit)
        return wanted

    @staticmethod
    def _whole_number(name: str, value: int | None, default: int, low: int, high: int) -> int:
        if value is None:
            return default
        if error := range_error(value, low, high):
            raise refuse(name, *error)
        return value


def _for_prompt_only(sampling: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """One token, whose end is the limit: cluster/protocol/first_token.py then spares the decode worker. It is drawn
    greedily, without what only tokens of an answer need."""
    return common_pb2.SamplingParams(
        seed=sampling.seed,
        max_tokens=1,
        ignore_eos=True,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        prompt_top_logprobs=sampling.prompt_top_logprobs,
    )
