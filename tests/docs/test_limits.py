"""Limits that are constants, and defaults of settings, as the documents state them."""

from __future__ import annotations

import re

import pytest

from cluster.config import adapters
from cluster.config.router import RouterConfig
from cluster.grammar.spec import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_CHOICES
from cluster.membership.known_adapters import MAX_REMOVED
from cluster.protocol import times
from engine.grammar_masks import MASK_SECONDS
from engine.lora.loaded import READ_SECONDS
from engine.sampling.grammar.llguidance_backend import MAX_ANSWER_BYTES
from router.frontends.http.adapters import WAIT_SECONDS
from router.frontends.http.openai.requests import COMPLETION_TOKENS
from router.frontends.http.responses.request import MAX_METADATA
from router.placement.last_loads import READ_LEAST, VALID_SECONDS
from router.quota.unsettled import KEPT_SECONDS
from router.request.grammar.schema_walk import MAX_DEPTH
from router.request.tool_schemas import MAX_REFUSED
from router.request.tools import MAX_KWARG_CHARACTERS, MAX_KWARG_NAME, MAX_KWARGS, NAME
from router.request.validator import MAX_REQUEST_ID
from router.text.parsers.grammars import MAX_CALLS
from router.text.parsers.tools.pythonic import MAX_CALLS_TEXT
from tests.docs.pages import ROOT

API = " ".join((ROOT / "docs" / "api.md").read_text().split())
RELIABILITY = " ".join((ROOT / "docs" / "reliability.md").read_text().split())
_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
STATED = [
    f"at most {MAX_REQUEST_ID} characters; without it the router generates one",
    f"`max_tokens` defaults to {COMPLETION_TOKENS}",
    f"A grammar has at most {MAX_GRAMMAR_BYTES >> 10} KiB, a schema at most {MAX_DEPTH} levels.",
    f"functions with `name` (`^{NAME.pattern}$`)",
    f"`parameters` (a JSON schema of at most {MAX_DEPTH} levels)",
    f"at most {MAX_KWARGS} plain values, with names of at most {MAX_KWARG_NAME} characters and texts of at most "
    f"{MAX_KWARG_CHARACTERS:,};",
    f"of at most {MAX_CALLS_TEXT:,} characters; calls are sent when it ends",
    f"A demanded answer has at most {MAX_CALLS} calls",
    f"or more than {MAX_REFUSED} have none",
    f"at most {MAX_METADATA} texts, returned with the answer",
    f"the first a letter or a digit, at most {adapters.MAX_NAME})",
    f"so is a {adapters.MAX_ADAPTERS + 1}th name",
    f"After {WAIT_SECONDS:g} s the answer is 504",
    f"each for {READ_SECONDS:g} s at most",
    f"the last {MAX_REMOVED} names that were unloaded",
    f"({MASK_SECONDS:g} s of processor time to find the next tokens, {MAX_ANSWER_BYTES >> 20} MiB of memory",
]

PROMISED = [
    f"suspect after {times.SUSPECT_SECONDS:g} s, lost after {times.LOST_SECONDS:g} s of silence over its link",
    f"Ranks send a beat with their progress every {times.RANK_BEAT_SECONDS:g} s",
    f"While a rank has been silent for more than {times.RANK_QUIET_SECONDS:g} s",
    f"starts that need it end after {times.RAY_HEAD_LOST_SECONDS:g} s",
    f"those of the {READ_LEAST} least loaded workers of each role; those read more than {VALID_SECONDS:g} s ago no longer",
    f"quota settlements wait up to {KEPT_SECONDS:g} s",
]


def test_the_most_choices_of_a_grammar_are_stated_once() -> None:
    number = f"{MAX_GRAMMAR_CHOICES:,}"
    stated = [page.name for page in (ROOT / "docs").glob("*.md") if number in page.read_text()]
    assert stated == ["api.md"]


@pytest.mark.parametrize("sentence", STATED)
def test_the_page_of_the_api_states_a_limit_as_it_is(sentence: str) -> None:
    assert sentence in API


@pytest.mark.parametrize("sentence", PROMISED)
def test_the_page_of_reliability_states_a_time_as_it_is(sentence: str) -> None:
    assert sentence in RELIABILITY


def test_the_page_of_the_api_states_defaults_of_settings_as_they_are() -> None:
    stated = re.findall(r"`(max_\w+)` \(([\d,]+)(?: (\wiB))?\)", API)
    assert {name for name, _, _ in stated} >= {"max_logprobs", "max_prompts", "max_text_bytes", "max_tools"}
    for name, number, unit in stated:
        assert RouterConfig.model_fields[name].default == int(number.replace(",", "")) * _BYTES[unit], name
