"""The models that a router serves: what each needs to read requests and to write answers."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config.router import RouterConfig
from cluster.errors import UnsupportedFieldError
from cluster.protocol.pooling import Embedding
from router.request.adapters import Adapters, no_adapters
from router.request.answer_formats import formats_of
from router.request.answer_plan import AnswerPlans
from router.request.grammar.requested import GrammarChecks
from router.request.validator import Validator
from router.text.tokenizer import ModelText

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    text: ModelText
    validator: Validator
    grammars: GrammarChecks
    plans: AnswerPlans

    @classmethod
    def of(cls, config: RouterConfig, text: ModelText, adapters: Adapters = no_adapters) -> ServedModel:
        """`config`: of this model (RouterConfig.by_model). `adapters`: those that requests may name."""
        grammars = GrammarChecks(text.tokenizer_json(), text.vocab_size, text.eos_token_ids)
        plans = AnswerPlans(formats_of(config, text), grammars.refusal)
        return cls(text, Validator(config, text, adapters), grammars, plans)

    @property
    def name(self) -> str:
        """The name that answers show, also where a request names an alias."""
        return self.validator.limits.served_model

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.validator.limits.settings.model_aliases

    @property
    def embedding(self) -> Embedding:
        """How embeddings are made. Raises UnsupportedFieldError saying why the model makes none."""
        if self.text.embedding is None:
            raise UnsupportedFieldError(
                f"model: {self.name} makes no embeddings: {self.text.embedding_refusal}", field="model"
            )
        return self.text.embedding

    @property
    def names(self) -> list[tuple[str, str]]:
        """The model's and those of adapters that workers have loaded, each with its parent; the model has none."""
        adapters = self.validator.limits.adapters()
        return [(self.name, ""), *((name, self.name) for name, digest in adapters.items() if digest)]


def further_models(
    config: RouterConfig,
    texts: Mapping[str, ModelText],
    adapters_of: Callable[[str], Adapters] = lambda _: no_adapters,
) -> dict[str, ServedModel]:
    """The models of `config.models` by their names and aliases; `texts` and `adapters_of` by name."""
    found: dict[str, ServedModel] = {}
    for name, own in config.by_model().items():
        if name in texts:
            model = ServedModel.of(own, texts[name], adapters_of(name))
            found.update(dict.fromkeys((name, *own.model_aliases), model))
    return found


def listed(models: Sequence[ServedModel]) -> list[tuple[ServedModel, str, str]]:
    """Each model's name and those of its adapters, with their parents. A name is listed once, at that to which it leads: a
    model before an adapter, an adapter of an earlier model before one of a later."""
    return [(one, name, parent) for one, name, parent, hidden in _names(models) if not hidden]


def _names(models: Sequence[ServedModel]) -> list[tuple[ServedModel, str, str, str]]:
    """Each name as in `listed`, with what hides it; empty: nothing does."""
    taken = dict.fromkeys(models[0].validator.limits.accepted_names, "is the name or an alias of a model")
    found = []
    for one in models:
        for name, parent in one.names:
            found.append((one, name, parent, taken.get(name, "") if parent else ""))
            taken.setdefault(name, f"is that of an adapter of {one.name!r}")
        for name in one.validator.limits.kept_names:  # also while its workers are away
            taken.setdefault(name, f"is that of an adapter of {one.name!r}")
    return found


class NameWatch:
    """Logs, once, adapters that no request reaches: workers' settings may give them a name that is another's."""

    def __init__(self) -> None:
        self._seen: list[Mapping[str, str]] = []
        self._hidden: set[tuple[str, str]] = set()  # name and model

    def look(self, models: Sequence[ServedModel]) -> None:
        seen = [one.validator.limits.adapters() for one in models]
        if len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen)):
            return
        found = {(name, parent): hidden for _, name, parent, hidden in _names(models) if hidden}
        for (name, parent), hidden in found.items():
            if (name, parent) not in self._hidden:
                log.warning(
                    "adapter %s of %s gets no requests: its name %s; name it otherwise in its workers' lora",
                    *(name, parent, hidden),
                )
        self._seen, self._hidden = seen, {*found}
