"""Step buffers hold what a step's plan says, on the leader and on a rank that gets the delta as bytes."""

from __future__ import annotations

import pytest
import torch

from engine.engine import Engine
from engine.plan import BlockCopy, PlanItem, StepPlan
from engine.request import EngineRequest, SamplingParams, TokenOutput
from engine.scheduler.sequence import NO_ROW, Sequence
from engine.scheduler.table_rows import TableRows
from engine.step_buffers import Chunk, StepBuffers
from engine.step_delta import StepDelta
from tests.engine.fake_model import FakeRunner, continuation
from tests.engine.parts import request

PAGE = 4


def make(*, staged: bool = False) -> StepBuffers:
    return StepBuffers(6, 8, 32, PAGE, torch.device("cpu"), staged=staged)


def sent(plan: StepPlan) -> StepDelta:
    return StepDelta.from_bytes(StepDelta.of(plan).to_bytes())


MIXED = [
    PlanItem("one", [7], 5, [4, 9], 3, 1),
    PlanItem("chunk", [1, 2, 3], 3, [2, 5], 0, 0, export=True),
    PlanItem("verified", [8, 6, 8], 0, [11], 5, 2),
    PlanItem("other", [5], 0, [3], 1, 1),
]


def test_a_delta_is_the_same_after_its_way_to_a_rank():
    delta = StepDelta.of(StepPlan(MIXED, [BlockCopy(1, 2), BlockCopy(7, 3)]))
    again = StepDelta.from_bytes(delta.to_bytes())
    for mine, its in zip(delta[:-1], again[:-1], strict=True):
        assert mine.tolist() == its.tolist() and mine.shape == its.shape  # type: ignore[union-attr]
    assert again.exports == [(1, "chunk")] and again.copies.tolist() == [[1, 2], [7, 3]]


@pytest.mark.parametrize("staged", [False, True])
def test_a_step_of_chunks_and_tokens(staged):
    step = make(staged=staged)
    step.load(sent(StepPlan(MIXED, [])))
    assert step.tokens.tolist() == [7, 1, 2, 3, 8, 6, 8, 5]
    assert step.positions.tolist() == [5, 3, 4, 5, 0, 1, 2, 0]
    assert step.slots.tolist() == [37, 11, 20, 21, 44, 45, 46, 12]
    assert step.cu_q.tolist() == [0, 1, 4, 7, 8] and step.cu_k.tolist() == [0, 6, 12, 15, 16]
    assert step.ends.tolist() == [6, 6, 3, 1] and step.rows.tolist() == [3, 0, 5, 1]
    assert step.logit_rows.tolist() == [0, 5, 6, 7]
    assert step.singles.tolist() == [0, 3] and not step.all_single
    assert step.chunks == [Chunk(slice(1, 4), 0, 3, 6), Chunk(slice(4, 7), 5, 0, 3)]
    assert step.single_chunks() == [Chunk(slice(0, 1), 3, 5, 6), Chunk(slice(7, 8), 1, 0, 1)]
    assert (step.longest, step.most_tokens) == (6, 3)
    assert step.exports() == [("chunk", 3, 6, [2, 5])]
    assert step.table[:6, :2].tolist() == [[2, 5], [3, 0], [0, 0], [4, 9], [0, 0], [11, 0]]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("wanted", "rows"), [((1, 1, 1), [0, 1, 2]), ((1, 0, 1), [0, 2]), ((0, 0, 0), [])])
def test_a_step_of_single_tokens(staged, wanted, rows):
    """After one of chunks, whose entries must not stay. A prompt's chunk of one token may want no logits."""
    step = make(staged=staged)
    step.load(sent(StepPlan(MIXED, [])))
    tables = {3: [4, 9], 0: [2, 5], 1: [3]}
    items = [
        PlanItem(str(row), [token], begin, tables[row], row, want, blocks_in_row=len(tables[row]))
        for row, token, begin, want in zip((3, 0, 1), (7, 8, 9), (6, 7, 1), wanted, strict=True)
    ]
    step.load(sent(StepPlan(items, [])))
    assert step.tokens.tolist() == [7, 8, 9] and step.positions.tolist() == [6, 7, 1]
    assert step.slots.tolist() == [38, 23, 13] and step.rows.tolist() == [3, 0, 1]
    assert step.ends.tolist() == [7, 8, 2] and step.cu_k.tolist() == [0, 7, 15, 17]
    assert step.cu_q.tolist() == [0, 1, 2, 3] and step.singles.tolist() == [0, 1, 2]
    assert step.logit_rows.tolist() == rows and step.num_logits == len(rows)
    assert step.all_single and not step.chunks and (step.longest, step.most_tokens) == (8, 1)


@pytest.mark.parametrize("staged", [False, True])
def test_a_later_step_writes_only_new_blocks(staged):
    step = make(staged=staged)
    step.load(sent(StepPlan([PlanItem("one", [1] * 7, 0, [4, 9], 3, 1)], [])))
    delta = sent(StepPlan([PlanItem("one", [2, 3], 7, [4, 9, 6], 3, 1, blocks_in_row=2)], []))
    assert delta.updates.tolist() == [[3, 2, 1]] and delta.blocks.tolist() == [6]
    step.load(delta)
    assert step.table[3].tolist() == [4, 9, 6, 0, 0, 0, 0, 0]
    assert step.slots.tolist() == [39, 24] and step.all_single is False
    step.load(sent(StepPlan([PlanItem("two", [9], 4, [1, 2], 3, 1)], [])))
    assert step.slots.tolist() == [8] and step.all_single and step.chunks == []


def test_more_new_blocks_than_the_slab_has_room_for():
    """Those of long prompts."""
    step, prompts = (
        make(staged=True),
        [PlanItem(str(row), [1], 31, [8 * row + i for i in range(8)], row, 1) for row in range(6)],
    )
    step.load(sent(StepPlan(prompts, [])))
    assert step.table[:6].flatten().tolist() == list(range(48))


def test_a_step_is_written_while_the_last_one_is_copied():
    """The host has two parts that take turns."""
    step = make(staged=True)
    step.load(sent(StepPlan([PlanItem("one", [7], 5, [4, 9], 3, 1)], [])))
    on_its_way = step._slab.arrays["tokens"]
    step.load(sent(StepPlan([PlanItem("one", [8], 6, [4, 9], 3, 1)], [])))
    assert on_its_way[0] == 7 and step.tokens.tolist() == [8]


class LateCopies:
    """A device that copies only once the host waits for it."""

    def __init__(self, step: StepBuffers):
        self.pending: list[torch.Tensor] = []
        self.made: list[list[int]] = []  # the first tokens of each copy
        slab = step._slab
        first = slab._parts["tokens"][0].start
        device = slab._device

        class Late:
            def copy_(_, host: torch.Tensor, non_blocking: bool) -> None:
                assert non_blocking
                self.pending.append(host)

        class Copying:
            def began(_) -> None:
                _.number = len(self.made) + len(self.pending)

            def wait(_) -> None:
                while len(self.made) < getattr(_, "number", 0):
                    device.copy_(self.pending.pop(0))
                    self.made.append(device[first : first + 16].view(torch.int64).tolist())

        slab._device = Late()  # type: ignore[assignment]
        slab._copying = [Copying(), Copying()]

    def all(self, step: StepBuffers) -> list[list[int]]:
        for one in step._slab._copying:
            one.wait()
        return self.made


def test_a_part_of_the_host_is_not_written_before_its_copy_was_made():
    """Nobody waits for steps without draws; a device that is behind would get a later step's tokens."""
    step = make(staged=True)
    copies = LateCopies(step)
    for number in range(5):
        step.load(sent(StepPlan([PlanItem("prompt", [number, number], 2 * number, [4, 5, 6], 0, 0)], [])))
        assert len(copies.made) == max(0, number - 1), "no wait for the last two steps"
    assert copies.all(step) == [[number, number] for number in range(5)]


@pytest.mark.parametrize("staged", [False, True])
def test_tokens_that_the_host_has_not_read(staged):
    step = make(staged=staged)
    items = [
        PlanItem(str(row), [token], 5, [2 * row, 2 * row + 1], row, 1)
        for row, token in enumerate([-2, 9, -1, -2])
    ]
    step.load(sent(StepPlan(items, [])), torch.tensor([70, 80]))
    assert step.tokens.tolist() == [80, 9, 70, 80]


def test_tensors_stay_where_they_are():
    """Compiled job lists and graphs keep their addresses."""
    step = make()
    step.load(sent(StepPlan(MIXED, [])))
    names = ("tokens", "positions", "slots", "cu_q", "cu_k", "ends", "rows", "singles", "logit_rows", "table")
    before = {name: getattr(step, name).data_ptr() for name in names}
    step.load(sent(StepPlan(MIXED[:1], [])))
    assert {name: getattr(step, name).data_ptr() for name in names} == before
    assert all(address % 64 == 0 for name, address in before.items() if name != "table")


def sequences(count: int) -> list[Sequence]:
    return [Sequence(request(str(i), [1]), 0, [1], i) for i in range(count)]


def test_a_sequence_outside_the_step_gives_up_its_row():
    rows, (one, two, three) = TableRows(2), sequences(3)
    rows.assign({one: 1, two: 1})
    one.blocks_in_row = two.blocks_in_row = 5
    held = (one.row, two.row)
    rows.assign({one: 1, three: 1})
    assert (one.row, three.row) == held and (two.row, two.blocks_in_row) == (NO_ROW, 0)
    assert one.blocks_in_row == 5
    rows.check_integrity([one, two, three])
    rows.release(three)
    rows.release(three)
    rows.assign([one, two])
    assert two.row == held[1]
    rows.check_integrity([one, two, three])
    with pytest.raises(AssertionError, match="has left"):
        rows.check_integrity([one])


def test_more_sequences_run_than_a_step_can_have():
    """They take turns, in rows that are written again."""
    runner = FakeRunner(64, max_batch_tokens=3)
    engine = Engine(runner, runner.config, secret=b"s")
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    prompts = {str(i): [3 + i] * 5 for i in range(7)}
    for name, prompt in prompts.items():
        engine.reserve(EngineRequest(name, prompt, sampling), [], growth_tokens=2)
        runner.store(engine.block_ids(name), 0, prompt)
    got: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        first = continuation(prompt, 1)
        engine.commit(name, [TokenOutput(name, 0, len(prompt), first[0])])
        got[name] += first
    while engine.has_work:
        for token in engine.step().tokens:
            got[token.request_id].append(token.token_id)
        engine.check_integrity()
    assert got == {name: continuation(prompt, 10) for name, prompt in prompts.items()}
