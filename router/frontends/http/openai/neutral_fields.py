"""Fields of OpenAI's and vLLM's completions that change nothing here, or are accepted with values that ask for nothing."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic.json_schema import WithJsonSchema

from router.request.fields import OnlyNeutral
from router.request.options import GenerationOptions

Ignored: TypeAlias = Annotated[Any, WithJsonSchema({"description": "accepted, changes nothing"})]


class NeutralFields(GenerationOptions):
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    verbosity: Ignored = None

    functions: Annotated[Any, OnlyNeutral([])] = None
    function_call: Annotated[Any, OnlyNeutral("none")] = None
    echo: Annotated[Any, OnlyNeutral(False)] = None
    suffix: Annotated[Any, OnlyNeutral("")] = None
    modalities: Annotated[Any, OnlyNeutral(["text"])] = None
    audio: Annotated[Any, OnlyNeutral()] = None
    prediction: Annotated[Any, OnlyNeutral()] = None
    web_search_options: Annotated[Any, OnlyNeutral()] = None
    skip_special_tokens: Annotated[Any, OnlyNeutral(True)] = None
    moderation: Annotated[Any, OnlyNeutral()] = None

    # Of vLLM
    chat_template: Annotated[Any, OnlyNeutral()] = None
    documents: Annotated[Any, OnlyNeutral()] = None
    early_stopping: Annotated[Any, OnlyNeutral(False)] = None
    guided_decoding_backend: Ignored = None
    guided_whitespace_pattern: Annotated[Any, OnlyNeutral()] = None
    kv_transfer_params: Annotated[Any, OnlyNeutral()] = None
    length_penalty: Annotated[Any, OnlyNeutral(1.0, 1)] = None
    logits_processors: Annotated[Any, OnlyNeutral([])] = None
    media_io_kwargs: Annotated[Any, OnlyNeutral()] = None
    mm_processor_kwargs: Annotated[Any, OnlyNeutral()] = None
    repetition_detection: Annotated[Any, OnlyNeutral()] = None
    return_prompt_text: Annotated[Any, OnlyNeutral(False)] = None
    return_tokens_as_token_ids: Annotated[Any, OnlyNeutral(False)] = None
    thinking_token_budget: Annotated[Any, OnlyNeutral()] = None
    truncation_side: Annotated[Any, OnlyNeutral("left")] = None
    use_beam_search: Annotated[Any, OnlyNeutral(False)] = None
    vllm_xargs: Annotated[Any, OnlyNeutral()] = None
