"""One hand-off at a sending rank: which layers of which tokens are final, and the parts they are cut into.

engine thread ──note──► launched ──cut──► to ask ──ask──► parts ──grant──► read ──► written ──► verified

On a device "computed" is a mark that the engine's thread makes behind each group of layers: the thread runs ahead of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kv_transfer import messages as m
from kv_transfer.device.base import REACHED, Mark, Pending, ReadPart
from kv_transfer.layout.geometry import Flow
from kv_transfer.memory import Chunk
from kv_transfer.transports.base import PendingWrite
from wire import handoff_pb2


@dataclass(frozen=True)
class Job:
    """Final KV: these layers of these tokens, for one flow."""

    flow: Flow
    layers: range
    tokens: range
    block_ids: Sequence[int]  # of these tokens
    bytes: int


@dataclass(eq=False)
class Part:
    """One part of one flow."""

    job: Job
    index: int
    computed: Mark = REACHED  # the part is read after it
    grant: handoff_pb2.SlotGrant | None = None
    posted: bool = False  # under its present grant
    grants: set[tuple[int, int]] = field(default_factory=set)  # (slot, generation) of all its grants
    pieces: list[Tensor] | None = None  # of the cache, written from there; None = through staging
    chunk: Chunk | None = None  # of staging, from its first grant until it is verified
    reading: Pending[ReadPart] | None = None  # until it is posted
    digest: bytes = b""
    digest_kind: str = ""
    write: PendingWrite | None = None
    verified: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.job.flow.target_rank, self.index


@dataclass(frozen=True)
class Cutting:
    """Sizes by which KV is cut into parts."""

    num_layers: int
    page_size: int
    token_bytes: int  # of one head in one layer, K or V
    part_bytes: int  # cut as soon as this much is final
    max_part_bytes: int  # what staging takes

    def bytes(self, flows: Sequence[Flow], layers: int, tokens: int) -> int:
        """Bytes of so many layers and tokens in the flow with the most heads."""
        heads = max((flow.head_end - flow.head_begin for flow in flows), default=0)
        return layers * 2 * heads * tokens * self.token_bytes

    def jobs(
        self, flow: Flow, slot_bytes: int, layers: range, tokens: range, blocks: Sequence[int]
    ) -> Iterator[Job]:
        """Cut into jobs that fit one slot: by whole blocks of tokens, and by layers only if one block of all of them
        does not fit, so that the rows to copy are as long as possible. `blocks` are the whole request's."""
        page = self.page_size
        limit = min(slot_bytes, self.max_part_bytes)
        layer_step = min(len(layers), max(1, limit // self.bytes([flow], 1, min(page, len(tokens)))))
        token_step = len(tokens) + page  # one part
        if self.bytes([flow], layer_step, len(tokens)) > limit:
            token_step = max(1, limit // self.bytes([flow], layer_step, page)) * page
        for first in range(layers.start, layers.stop, layer_step):
            some = range(first, min(first + layer_step, layers.stop))
            begin = tokens.start
            while begin < tokens.stop:
                # Cut at block borders, also if the range begins inside a block.
                end = min(tokens.stop, (begin // page) * page + token_step)
                ids = blocks[begin // page : -(-end // page)]
                size = self.bytes([flow], len(some), end - begin)
                yield Job(flow, some, range(begin, end), ids, size)
                begin = end


@dataclass(frozen=True)
class Group:
    """Layers of a chunk, enough for a part or the chunk's last ones."""

    layers: range
    begin: int
    end: int
    blocks: list[int]  # of the whole chunk
    computed: Mark


@dataclass(eq=False)
class NotedLayers:
    """Layers of a chunk that the engine's thread has enqueued and that are in no group yet. Used on that thread only."""

    cutting: Cutting
    flows: Sequence[Flow]
    layers: range = range(0)
    blocks: list[int] = field(default_factory=list)

    def note(
        self, layer: int, begin: int, end: int, block_ids: Sequence[int], mark: Callable[[], Mark]
    ) -> Group | None:
        """Note a layer of the tokens [begin, end); return the group that it completes, with a `mark` behind it."""
        if layer == 0:
            self.layers = range(0)
            self.blocks = list(block_ids[: -(-end // self.cutting.page_size)])
        self.layers = range(self.layers.start if self.layers else layer, layer + 1)
        size = self.cutting.bytes(self.flows, len(self.layers), end - begin)
        if layer < self.cutting.num_layers - 1 and size < self.cutting.part_bytes:
            return None
        group = Group(self.layers, begin, end, self.blocks, mark())
        self.layers = range(0)
        return group


@dataclass(eq=False)
class UncutLayers:
    """Layers of a chunk that are in no job yet."""

    layers: range = range(0)
    tokens: range = range(0)
    blocks: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Transfer:
    """One hand-off at a rank."""

    opened: m.OpenTransfer
    cutting: Cutting
    # Appended to by the engine thread, emptied by the rank's; a deque is safe for that.
    launched: deque[Group] = field(default_factory=deque)
    unasked: deque[Part] = field(default_factory=deque)
    # By (target rank, index): those that slots were requested for, in order
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # parts per target rank
    bytes: int = 0
    complete_tokens: int = 0
    announced: bool = False
    closing: bool = False
    failed: bool = False  # an exception in this rank: nothing more is posted until CloseTransfer
    _noted: NotedLayers = field(init=False)
    _seen_first: bool = False
    _uncut: UncutLayers = field(default_factory=UncutLayers)
    _last_asked: Mark = REACHED

    def __post_init__(self) -> None:
        self._noted = NotedLayers(self.cutting, self.opened.flows)

    def note(
        self,
        layer: int,
        token_begin: int,
        token_end: int,
        block_ids: Sequence[int],
        mark: Callable[[], Mark] = lambda: REACHED,
    ) -> bool:
        """On the engine's thread: this layer of these tokens is enqueued. Returns whether there is enough for a part; then
        `mark` was called, once."""
        group = self._noted.note(layer, token_begin, token_end, block_ids, mark)
        if group is not None:
            self.launched.append(group)
        return group is not None

    @property
    def cuttable(self) -> bool:
        return bool(self.launched) and not (self.closing or self.failed)

    @property
    def all_cut(self) -> bool:
        """Whether every layer of every token is in a part, so that the number of parts is final."""
        whole = self.complete_tokens >= self.opened.token_count or not self.opened.flows
        return whole and not self.launched

    @property
    def writing(self) -> bool:
        return any(part.write is not None for part in self.parts.values())

    @property
    def waits_for_device(self) -> bool:
        """Whether something is being read, or the next part waits for a mark that is not reached."""
        return self.reading or (bool(self.unasked) and self._last_asked.result() is None)

    @property
    def reading(self) -> bool:
        """Whether the device still reads from the request's blocks."""
        return any(part.reading is not None and part.reading.result() is None for part in self.parts.values())

    def cut(self) -> bool:
        """Cut noted layers into jobs, once they have `part_bytes` or include the step's last layer. All noted layers are
        cut together, because more layers make longer rows."""
        worked = False
        while self.launched:
            self._cut_one(self.launched.popleft())
            worked = True
        return worked

    def _cut_one(self, group: Group) -> None:
        held, first, stop = self.opened.held_tokens, group.layers.start, group.layers.stop
        if first == 0:
            self._uncut = UncutLayers(range(0), range(max(group.begin, held), group.end), group.blocks)
            if not self._seen_first:
                self._seen_first = True
                if group.begin > held:  # from this worker's own prefix cache: final in every layer
                    layers = range(self.cutting.num_layers)
                    self._add(layers, range(held, group.begin), group.computed)
        uncut = self._uncut
        uncut.layers = range(uncut.layers.start if uncut.layers else first, stop)
        last = stop == self.cutting.num_layers
        size = self.cutting.bytes(self.opened.flows, len(uncut.layers), len(uncut.tokens))
        if last or (size >= self.cutting.part_bytes and not self.launched):
            layers, uncut.layers = uncut.layers, range(0)
            if uncut.tokens:
                self._add(layers, uncut.tokens, group.computed)
        if last:
            self.complete_tokens = uncut.tokens.stop

    def _add(self, layers: range, tokens: range, computed: Mark) -> None:
        for flow in self.opened.flows:
            for job in self.cutting.jobs(flow, self.opened.slot_bytes, layers, tokens, self._uncut.blocks):
                index = self.counts.get(flow.target_rank, 0)
                self.counts[flow.target_rank] = index + 1
                self.bytes += job.bytes
                self.unasked.append(Part(job, index, computed))

    def ask(self, limit: int) -> list[Part]:
        """The next parts to request slots for; at most `limit` may be requested and not yet verified.

        Of those that are not computed only the first: a slot's deadline begins when it is granted.
        """
        asked: list[Part] = []
        while self.unasked and len(self.parts) < limit and self._last_asked.result():
            part = self.unasked.popleft()
            self._last_asked = part.computed
            self.parts[part.key] = part
            asked.append(part)
        return asked

    @property
    def staged_bytes(self) -> int:
        return sum(part.chunk.size for part in self.parts.values() if part.chunk is not None)


def part_header(opened: m.OpenTransfer, part: Part, grant: handoff_pb2.SlotGrant) -> handoff_pb2.PartHeader:
    """The header that travels with the bytes; the decode worker checks it against its own records."""
    job = part.job
    return handoff_pb2.PartHeader(
        transfer_id=opened.transfer_id,
        prefill_epoch=opened.prefill_epoch,
        decode_epoch=opened.decode_epoch,
        generation=grant.generation,
        slot=grant.slot,
        source_rank=job.flow.source_rank,
        target_rank=job.flow.target_rank,
        part=part.index,
        layer_begin=job.layers.start,
        layer_end=job.layers.stop,
        token_begin=job.tokens.start,
        token_end=job.tokens.stop,
        head_begin=job.flow.head_begin,
        head_end=job.flow.head_end,
        bytes=job.bytes,
        digest_kind=part.digest_kind,
        digest=part.digest,
    )
