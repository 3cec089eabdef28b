"""Reserves blocks in the engine for a hand-off, and commits or aborts the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from cluster.errors import BatonError, CancelledError, DeadlineError, EngineRequestError, InvalidRequestError
from cluster.faults.points import Point
from cluster.grammar.spec import GrammarSpec
from cluster.protocol.block_hash import hash_blocks
from cluster.protocol.names import invalid
from decode_worker.attempt import DecodeAttempt, DecodeState
from decode_worker.attempts import DecodeAttempts
from engine.compiled_grammar import CompiledGrammar
from engine.engine import Engine
from engine.request import EngineRequest
from kv_transfer.contract import Reservation, TransferId
from wire import common_pb2, handoff_pb2
from worker.convert import request_from_wire, tokens_from_wire
from worker.role import RoleParts
from worker.validate import check_spec

# Blocks are reserved for as many new tokens of each choice; longer answers grow block by block.
PROJECTED_GROWTH_TOKENS = 256
# That a commit waits for its grammar: below the time that a prefill worker waits for an answer. A worker's first grammar
# takes the longest: with it, the tokenizer is read.
GRAMMAR_SECONDS = 3.0


class HandoffEngineAdapter:
    """Implements kv_transfer.contract.DecodeEngine for one decode worker."""

    def __init__(self, parts: RoleParts, attempts: DecodeAttempts):
        self._parts = parts
        self._attempts = attempts
        self._at_reserved = parts.faults.point(Point.DECODE_RESERVED)
        self._at_committing = parts.faults.point(Point.DECODE_COMMITTING)
        self._at_committed = parts.faults.point(Point.DECODE_COMMITTED)

    async def reserve(self, request: handoff_pb2.Reserve) -> Reservation:
        """Reserve for a hand-off. Its grammar is compiled afterwards, and the commit waits for that."""
        self._parts.health.check_accepting()
        self._check(request)
        attempt = self._attempts.open_new(request)
        attempt.whole_tokens = request.spec.sampling.logprobs
        attempt.choices = max(1, request.spec.n)
        began = time.monotonic()
        attempt.first_choice, attempt.first_position = request.spec.first_choice, request.token_count
        # Refused ones come again and again; commits, aborts and pauses do not wait for all of them.
        wanted = request_from_wire(attempt.engine_id, request.spec)
        reserve = self._reserve_blocks(wanted, request)
        reservation = await self._parts.host.call(reserve, behind=True)
        try:
            self._reserved(attempt, request, reservation)
        except BaseException:
            await self._parts.host.call(lambda engine: engine.abort(attempt.engine_id))
            raise
        attempt.reserved = began
        if wanted.grammar is not None:
            self._compile(attempt, wanted.grammar, wanted.tenant)
        self._at_reserved(request.transfer_id)
        return reservation

    def _compile(self, attempt: DecodeAttempt, grammar: GrammarSpec, tenant: str) -> None:
        """While the prefill worker computes the prompt: a step that had to compile it would keep every other sequence
        waiting, and so would the prefill worker's request before its prompt."""
        compiling = self._parts.host.compile_grammar(grammar, tenant)
        attempt.compiling = asyncio.get_running_loop().create_task(compiling)
        attempt.compiling.add_done_callback(_retrieve)

    def _reserved(
        self, attempt: DecodeAttempt, request: handoff_pb2.Reserve, reservation: Reservation
    ) -> None:
        if attempt.machine.state is not DecodeState.EXPECTED:  # it ended while the engine reserved
            raise CancelledError("the attempt ended while its blocks were being reserved")
        attempt.trace = self._parts.trace_of(request.spec)
        attempt.report.not_shipped_tokens = reservation.held_tokens
        attempt.machine.to(DecodeState.RESERVED)

    def _reserve_blocks(
        self, wanted: EngineRequest, request: handoff_pb2.Reserve
    ) -> Callable[[Engine], Reservation]:
        left = wanted.sampling.max_tokens - len(wanted.output_tokens)
        growth = max(1, min(left, PROJECTED_GROWTH_TOKENS))
        packed = request.spec.prompt_tokens + request.spec.output_tokens
        page, secret = self._parts.identity.page_size, self._parts.config.secret.encode()

        def reserve(engine: Engine) -> Reservation:
            # Hashed here, from the tokens: a hash from the peer could name another prompt's blocks.
            hashes = hash_blocks(packed, page, secret=secret, salt=wanted.salt)
            taken = engine.reserve(wanted, hashes, growth)
            return Reservation(list(taken.block_ids), taken.held_tokens)

        return reserve

    async def commit(
        self,
        transfer_id: TransferId,
        first_tokens: Sequence[common_pb2.Token],
        report: common_pb2.WorkReport,
    ) -> None:
        attempt = self._attempts.get(transfer_id)
        if attempt is None or attempt.machine.state is not DecodeState.RESERVED:
            raise CancelledError("the attempt has ended")
        self._check_first(attempt, first_tokens)
        compiled = await self._compiled(attempt)
        self._at_committing(transfer_id)
        first = tokens_from_wire(attempt.engine_id, first_tokens)
        attempt.machine.to(DecodeState.COMMITTING)
        attempt.entered, attempt.is_entered = time.monotonic(), True
        self._attempts.enter(attempt)
        # Before the engine is called: its own tokens come after these.
        for token in first_tokens:
            whole = attempt.whole_tokens or token.finish
            attempt.log.add(token.choice, token.position, token.token_id, token if whole else None)
        try:
            await self._parts.host.call(lambda engine: engine.commit(attempt.engine_id, first, compiled))
        except EngineRequestError as error:  # so that the router gets the reason
            self._attempts.end(transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, error)
            raise
        if attempt.machine.may(DecodeState.DECODING):  # else its last token came before this answer
            attempt.machine.to(DecodeState.DECODING)
        self._at_committed(transfer_id)

    async def _compiled(self, attempt: DecodeAttempt) -> CompiledGrammar | None:
        """The grammar of a reservation, once it is compiled; None: it has none. Raises BatonError; CancelledError if the
        attempt has ended meanwhile."""
        if attempt.compiling is None:
            return None
        await asyncio.wait([attempt.compiling], timeout=GRAMMAR_SECONDS)
        if attempt.machine.state is not DecodeState.RESERVED or attempt.compiling.cancelled():
            raise CancelledError("the attempt has ended")
        try:
            if not attempt.compiling.done():
                late = f"grammar: it was not compiled {GRAMMAR_SECONDS:g} s after its prompt"
                raise DeadlineError(late, field="grammar")
            return attempt.compiling.result()
        except BatonError as error:  # so that the router gets the reason
            self._attempts.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, error)
            raise

    def _check(self, request: handoff_pb2.Reserve) -> None:
        """Check the request, and that `token_count` agrees with it. Raises InvalidRequestError."""
        check_spec(request.spec, self._parts.identity.spec_limits)
        tokens = (len(request.spec.prompt_tokens) + len(request.spec.output_tokens)) // 4
        if request.token_count != tokens:
            raise InvalidRequestError(f"token_count: {request.token_count} of {tokens}", field="token_count")
        for field in ("prompt_logprobs", "pooling"):
            if getattr(request.spec.sampling, field):
                raise invalid(field, "comes from the worker that computes the prompt, and is left out here")

    def _check_first(self, attempt: DecodeAttempt, tokens: Sequence[common_pb2.Token]) -> None:
        """Check that there is one token per choice, at the position after the prompt. Raises InvalidRequestError."""
        choices = [token.choice for token in tokens[: attempt.choices + 1]]
        wanted = list(range(attempt.first_choice, attempt.first_choice + attempt.choices))
        vocab_size = self._parts.identity.spec_limits.vocab_size
        if sorted(choices) != wanted or any(
            token.position != attempt.first_position
            or token.token_id >= vocab_size
            or len(token.top_logprobs) > vocab_size
            or token.finish not in common_pb2.FinishReason.values()
            for token in tokens
        ):
            raise InvalidRequestError(
                f"first_tokens: one for each of {attempt.choices} choices", field="first_tokens"
            )

    async def abort(self, transfer_id: TransferId, verified_tokens: int) -> None:
        engine_id = transfer_id.hex()
        try:
            await self._parts.host.call(lambda engine: engine.abort(engine_id, verified_tokens))
        finally:  # also if the engine has failed: a reader may wait for the end
            self._attempts.end(transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, None)


def _retrieve(compiling: asyncio.Task[CompiledGrammar]) -> None:
    """Without a commit that takes the error, asyncio would log it as lost."""
    if not compiling.cancelled():
        compiling.exception()
