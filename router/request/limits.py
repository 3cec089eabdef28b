"""Bounds of a request that depend on a router's settings or on its model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.config.router import RouterConfig
from cluster.errors import ContextLengthError, UnavailableError, UnknownModelError
from router.request.adapters import Adapters, KnownNames, NoWorkers, no_adapters
from router.text.tokenizer import ModelText

MAX_SHOWN = 80  # characters of a client's value in an error


@dataclass(frozen=True)
class FieldLimits:
    """Markers of fields (router/request/fields.py) hold the names of attributes, or of the router's settings."""

    settings: RouterConfig
    served_model: str
    max_model_len: int
    vocab_size: int
    adapters: Adapters = no_adapters

    @classmethod
    def of(cls, settings: RouterConfig, text: ModelText, adapters: Adapters = no_adapters) -> FieldLimits:
        own = text.max_position_embeddings
        served = settings.served_name
        return cls(settings, served, min(settings.max_model_len or own, own), text.vocab_size, adapters)

    @classmethod
    def widest(cls, every: Sequence[FieldLimits]) -> FieldLimits:
        """The first model's, with the bounds of the model that allows most."""
        context, vocab = max(one.max_model_len for one in every), max(one.vocab_size for one in every)
        return replace(every[0], max_model_len=context, vocab_size=vocab)

    def __getitem__(self, name: str) -> Any:
        return getattr(self if hasattr(self, name) else self.settings, name)

    @property
    def accepted_names(self) -> list[str]:
        """The names that a request's `model` may have: of all models, with their aliases."""
        return ["", *self.settings.model_names, *self.settings.all_aliases]

    @property
    def last_token(self) -> int:
        return self.vocab_size - 1

    @property
    def room(self) -> int:
        """The longest answer: to the shortest prompt."""
        return max(1, self.max_model_len - 1)

    @property
    def ignore_unknown(self) -> bool:
        return self.settings.unknown_fields == "ignore"

    @property
    def lower_first(self) -> bool:
        """Whether the lower of two numeric priorities comes first."""
        return self.settings.priority_order == "lower_first"

    @property
    def priority_signs(self) -> str:
        signs = (
            "below 0 is high, 0 normal, above 0" if self.lower_first else "above 0 is high, 0 normal, below 0"
        )
        return f"a class: {signs} batch"

    def serves(self, model: str) -> bool:
        """Whether it is a name of this model, or of an adapter of it."""
        return self._is_own(model) or model in self.adapters()

    def keeps(self, model: str) -> bool:
        """Whether it is a name of this model, or of an adapter that a worker has, or had and may have again."""
        return self._is_own(model) or bool(self.adapters().get(model)) or model in self.kept_names

    @property
    def kept_names(self) -> Collection[str]:
        """The names of adapters that are kept."""
        found = self.adapters()
        return found.kept if isinstance(found, KnownNames) else ()

    def _is_own(self, model: str) -> bool:
        return not model or model == self.served_model or model in self.settings.model_aliases

    def named(self, model: str) -> str:
        """The name of the adapter, or of the model, that a name of this model means. Raises UnknownModelError."""
        if self._is_own(model):
            return self.served_model
        if not self.may_be_adapter(model):
            raise self._unknown(model)
        return model

    def may_name(self, model: str) -> bool:
        """Whether it is a name of this model or adapter, or may be an adapter's."""
        return self._is_own(model) or self.may_be_adapter(model)

    def may_be_adapter(self, model: str) -> bool:
        """Whether it is the name of an adapter, or could be one that no worker is there to name."""
        found = self.adapters()
        return model in found or isinstance(found, NoWorkers)

    def check_model(self, model: str) -> None:
        """Raises what `adapter_of` does."""
        self.adapter_of(model)

    def adapter_of(self, model: str) -> str:
        """The digest of the adapter of this name; "" for the served model. Raises UnknownModelError, UnavailableError for
        an adapter that no worker has now."""
        if self._is_own(model):
            return ""
        digest = self.adapters().get(model)
        if digest:
            return digest
        if self.may_be_adapter(model):
            why = "no worker is available" if digest is None else "no worker has loaded this adapter now"
            raise UnavailableError(
                f"model: {model[:MAX_SHOWN]!r}: {why}", field="model", retry_after_seconds=1.0
            )
        raise self._unknown(model)

    def _unknown(self, model: str) -> UnknownModelError:
        served = ", ".join(map(repr, self.settings.model_names))
        are = "are" if self.settings.models else "is"
        return UnknownModelError(
            f"model: {model[:MAX_SHOWN]!r} is not served here; {served} {are}", field="model"
        )

    def check_lengths(self, prompt_tokens: int, resume_tokens: int = 0, field: str = "prompt") -> None:
        """Check counts before anything iterates over the tokens: one may hold millions. `field`: that of the
        prompt.

        Raises ContextLengthError.
        """
        for name, tokens in ((field, prompt_tokens), ("resume_tokens", prompt_tokens + resume_tokens)):
            if tokens >= self.max_model_len:
                raise self._too_long(name, f"{tokens} tokens leave no room in")

    def check_messages(self, count: int) -> None:
        """Refuse more messages than the context has tokens, before they are rendered: each takes at least one token.

        Raises ContextLengthError.
        """
        if count >= self.max_model_len:
            raise self._too_long("messages", f"{count} messages do not fit")

    def _too_long(self, name: str, what: str) -> ContextLengthError:
        limit = self.max_model_len
        message = f"{name}: {what} a context of {limit} tokens"
        return ContextLengthError(message, field=name, limit=str(limit))
