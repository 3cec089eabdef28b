from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from pydantic import ValidationError

from loadgen.config import LoadConfig
from loadgen.schedule import session_schedule
from loadgen.workload import ChatPrompt, TextPrompt, TokenPrompt, make_workload


def config(**settings: Any) -> LoadConfig:
    return LoadConfig(**{"requests": 100, **settings})


def prompts(settings: LoadConfig, count: int = 20) -> list[Any]:
    workload = make_workload(settings)
    return [workload(index).next(None) for index in range(count)]


@pytest.mark.parametrize("workload", ["plain", "shared", "conversation"])
def test_same_seed_same_prompts_other_seed_other_prompts(workload: Any) -> None:
    assert prompts(config(workload=workload)) == prompts(config(workload=workload))
    assert prompts(config(workload=workload)) != prompts(config(workload=workload, seed=1))


def test_plain_prompts_have_nothing_in_common() -> None:
    assert (
        len({prompt.ids[0] * 4096 + prompt.ids[1] for prompt in prompts(config(prompt_kind="tokens"))}) >= 19
    )
    assert all(isinstance(prompt, TextPrompt) for prompt in prompts(config()))
    assert all(isinstance(prompt, ChatPrompt) for prompt in prompts(config(prompt_kind="chat")))


def test_token_prompts_have_exact_lengths_and_ids_of_the_vocabulary() -> None:
    found = prompts(config(prompt_kind="tokens", prompt_tokens=37, vocab_size=600))
    assert {len(prompt.ids) for prompt in found} == {37}
    assert all(256 <= token < 600 for prompt in found for token in prompt.ids)


def test_lengths_vary_as_far_as_asked() -> None:
    found = prompts(config(prompt_kind="tokens", prompt_tokens=100, prompt_spread=0.2), 200)
    lengths = {len(prompt.ids) for prompt in found}
    assert min(lengths) >= 80
    assert max(lengths) <= 120
    assert len(lengths) > 20


def test_shared_prompts_share_exactly_their_prefix() -> None:
    found = prompts(config(workload="shared", prompt_kind="tokens", prefix_tokens=48, prompt_tokens=16))
    assert {len(prompt.ids) for prompt in found} == {64}
    assert len({tuple(prompt.ids[:48]) for prompt in found}) == 1
    assert len({tuple(prompt.ids[48:]) for prompt in found}) == 20


def test_prompts_share_as_many_prefixes_as_are_asked_for() -> None:
    settings = config(workload="shared", prompt_kind="tokens", prefix_tokens=8, prefixes=3)
    assert len({tuple(prompt.ids[:8]) for prompt in prompts(settings, 60)}) == 3


def test_a_single_request_session_ends_after_its_answer() -> None:
    session = make_workload(config(prompt_kind="tokens"))(0)
    assert isinstance(session.next(None), TokenPrompt)
    assert session.next("answer") is None


def test_conversations_end_after_their_turns() -> None:
    session = make_workload(config(workload="conversation", turns=2, questions=("q",)))(0)
    assert session.next(None) == ChatPrompt([("user", "q")])
    assert session.next("a") == ChatPrompt([("user", "q"), ("assistant", "a"), ("user", "q")])
    assert session.next("b") is None


def test_a_constant_rate_has_equal_pauses() -> None:
    schedule = session_schedule(config(rate=4.0, arrival="constant", requests=3))
    assert schedule == pytest.approx([0.25, 0.5, 0.75])


def test_poisson_schedule_keeps_its_rate_and_its_seed() -> None:
    settings = config(rate=50.0, requests=5000)
    schedule = session_schedule(settings)
    assert schedule == session_schedule(settings)
    assert schedule != session_schedule(settings.model_copy(update={"seed": 1}))
    assert 5000 / schedule[-1] == pytest.approx(50.0, rel=0.1)
    assert list(islice(schedule, 10)) == sorted(schedule)[:10]


def test_conversations_start_so_often_that_requests_come_at_the_rate() -> None:
    settings = config(
        rate=8.0, arrival="constant", requests=None, seconds=10.0, workload="conversation", turns=4
    )
    assert len(session_schedule(settings)) == 19


@pytest.mark.parametrize(
    "settings",
    [
        {"requests": None},
        {"seconds": 3.0},
        {"rate": 0.0},
        {"workload": "conversation", "prompt_kind": "tokens"},
        {"colour": "red"},
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**settings)
