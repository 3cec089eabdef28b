"""The models that a router serves: what each needs to read requests and to write answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.config.router import RouterConfig
from cluster.errors import UnsupportedFieldError
from cluster.protocol.pooling import Embedding
from router.request.adapters import Adapters, no_adapters
from router.request.answer_formats import formats_of
from router.request.answer_plan import AnswerPlans
from router.request.grammars import GrammarChecks
from router.request.validator import Validator
from router.text.tokenizer import ModelText


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
        """What answers show, also where a request names an alias."""
        return self.validator.limits.served_model

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
