"""What a request excludes from its answers, as both frontends read it."""

from __future__ import annotations

from router.gateway import RequestGateway
from router.request.fields import refuse
from router.request.options import GenerationOptions
from router.request.served_model import ServedModel
from router.request.token_options import NO_EXCLUSIONS, Exclusions, exclusions_of


async def read_exclusions(
    gateway: RequestGateway, model: ServedModel, options: GenerationOptions, tenant: str
) -> Exclusions:
    """Once for all prompts of a request. Raises InvalidRequestError, DeadlineError."""
    allowed, words = options.allowed_ids, options.excluded_words
    if allowed is None and not words:
        return NO_EXCLUSIONS
    tokens = list[list[int]]()
    if words:
        tokens = await gateway.in_time(model.text.words(words, tenant=tenant), "bad_words")
        # Rare characters take several: every prompt's workers get them all
        most = model.validator.limits["max_bad_word_characters"]
        if max(map(len, tokens)) > most:
            raise refuse("bad_words", f"an entry has more than {most} tokens (max_bad_word_characters)", most)
    return exclusions_of(allowed, tokens, model.validator.limits.last_token)
