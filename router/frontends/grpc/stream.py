"""The answer of Generate.

started        with the first chunk; for a tenant with limits before it, as soon as the request is charged
chunk, …       the tokens of one choice that arrived together, or while the last message was being written
completed      usage and timings
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.router import RouterConfig
from cluster.errors import BatonError
from cluster.security.keys import Caller
from router.dispatch.dispatcher import RequestDispatcher
from router.dispatch.turn import Turn
from router.frontends.answer_queue import AnswerQueue
from router.frontends.grpc.call_writer import CallWriter
from router.frontends.grpc.encoding import encode_chunks
from router.frontends.grpc.gate import Context
from router.frontends.grpc.write_deadline import status_waits_for
from router.request.completion import Completion, Delta
from router.request.permissions import timings_for, workers_for
from wire import inference_pb2 as pb


class GenerateStream:
    def __init__(self, dispatcher: RequestDispatcher, completion: Completion, caller: Caller):
        self._dispatcher = dispatcher
        self._completion = completion
        self._caller = caller
        self._begun = False  # `started` is written
        self._writer: CallWriter

    async def pass_to(self, context: Context, config: RouterConfig, turn: Turn) -> None:
        """Start the dispatcher, and return once the whole answer is written.

        Raises the BatonError that ended the request, after what came before it, or CancelledError (cluster.errors) if the
        client reads nothing for `write_seconds`.
        """
        self._writer = writer = CallWriter(context, config.write_seconds)
        # A request that was charged gets its ticket before the first token: another router will not charge it again if
        # this one dies. Other requests get it with the first token, which saves a message.
        self._dispatcher.on_charged = self._charged
        try:
            try:
                queue = AnswerQueue(writer, self._write, 1, turn, self._caller.tenant, streamed=True)
                await queue.pass_all([self._dispatcher])
            except BatonError:
                await writer.written()
                raise
            writer.write([self._completed()])
            await writer.written()
        finally:
            writer.close()
            status_waits_for(writer.opening)

    def _charged(self) -> None:
        self._begun = True
        self._writer.write([self._started()])

    def _write(self, deltas: Sequence[Delta]) -> None:
        messages = encode_chunks(deltas)
        if not self._begun and messages:
            self._begun = True
            messages[0] = self._started() + messages[0]
        self._writer.write(messages)

    def _started(self) -> bytes:
        """A response with `started`. Put before another one's bytes it is a part of that."""
        started = pb.Started(
            request_id=self._completion.request_id,
            model=self._completion.model,
            seed=self._completion.sampling.seed,
            prompt_tokens=len(self._completion.prompt_tokens),
            worker_ids=workers_for(self._caller, self._dispatcher.worker_ids),
            resume_ticket=self._dispatcher.resume_ticket(),
            parsed=self._completion.answer_format is not None,
        )
        return pb.GenerateResponse(started=started).SerializeToString()

    def _completed(self) -> bytes:
        outcome = self._dispatcher.outcome
        timings = timings_for(self._caller, outcome.timings)
        completed = pb.Completed(usage=outcome.usage, timings=timings, explanation=outcome.explanation)
        return pb.GenerateResponse(completed=completed).SerializeToString()
