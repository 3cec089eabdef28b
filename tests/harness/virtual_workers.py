"""Workers on virtual time: real attempts, logs and links, and an engine that makes one token of each choice in a step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import DrainingError, PeerLostError
from cluster.faults.points import nothing
from cluster.membership.types import WorkerInfo
from cluster.protocol.first_token import ends_with_first_token
from tests.harness.virtual_network import Accepted, Network
from tests.harness.worker_info import worker_info
from wire import common_pb2, decode_pb2, prefill_pb2
from worker.attempt_log import AttemptLog
from worker.attempts import Attempts
from worker.link.connection import Connection
from worker.link.session import Session, State
from worker.link.turns import Dispatching, Handshakes

STEP_SECONDS = 0.02
Outcome = common_pb2.AttemptOutcome


def token_of(position: int, choice: int) -> int:
    return position * 16 + choice


def end_of(outcome: Any, error: Any = None) -> common_pb2.AttemptEnd:
    return common_pb2.AttemptEnd(outcome=outcome, error=error.to_wire() if error is not None else None)


@dataclass(eq=False)
class Served:
    transfer_id: bytes
    log: AttemptLog
    spec: common_pb2.GenerateSpec
    committed: bool = False
    paused: bool = False
    ended: bool = False
    made: Counter[int] = field(default_factory=Counter)  # by choice
    task: asyncio.Task[None] | None = None

    @property
    def choices(self) -> range:
        first = self.spec.first_choice
        return range(first, first + max(1, self.spec.n))

    @property
    def first(self) -> int:
        return (len(self.spec.prompt_tokens) + len(self.spec.output_tokens)) // 4

    @property
    def last(self) -> int:
        """Its last position."""
        return len(self.spec.prompt_tokens) // 4 + self.spec.sampling.max_tokens - 1

    def add(self, choice: int) -> None:
        position = self.first + self.made[choice]
        if position > self.last:
            return
        self.made[choice] += 1
        whole = self.spec.sampling.logprobs or position == self.last
        token_id = token_of(position, choice)
        extra = common_pb2.Token(choice=choice, position=position, token_id=token_id, logprob=-1.0)
        if position == self.last:
            extra.finish = common_pb2.FINISH_REASON_LENGTH
        self.log.add(choice, position, token_id, extra if whole else None)

    @property
    def complete(self) -> bool:
        return all(self.first + self.made[choice] > self.last for choice in self.choices)

    def end(self, outcome: Any, error: Any = None) -> None:
        if not self.ended:
            self.ended = True
            self.log.end(end_of(outcome, error))


class VirtualWorker:
    """The parts of a role that links and calls reach; `worker.role`s have the same order of steps."""

    def __init__(self, worker_id: str, role: Any, network: Network):
        self.worker_id, self.role, self.epoch = worker_id, role, 7
        self.network = network
        self.hangs = False
        self.peer: VirtualWorker | None = None  # at which a prefill worker reserves
        self.attempts: Attempts[Served] = Attempts(
            cancel=self._cancel, cancel_by_router=self.cancel, max_attempts=64, credited=self._credited
        )
        self.handshakes, self.dispatching = Handshakes(), Dispatching()
        self.open: set[Connection] = set()
        self.stepping = asyncio.get_running_loop().create_task(self._steps())
        network.accepts[worker_id] = self._accept

    @property
    def info(self) -> WorkerInfo:
        return worker_info(self.worker_id, self.epoch, self.role, self.worker_id, f"{self.worker_id}:1")

    # --- worker.link.connection.ConnectionOwner ------------------------------------------------------------

    def _accept(self, accepted: Accepted) -> None:
        def session(connection: Connection) -> Session:
            return Session(self.attempts.routers, self, connection, lambda: None if self.hangs else 1)

        self.open.add(Connection(session, self, accepted, None, nothing))  # type: ignore[arg-type]

    def forget(self, connection: Connection) -> None:
        self.open.discard(connection)

    def settled(self, connection: Connection) -> None: ...

    def ask_to_move(self) -> None:
        for connection in self.open:
            if connection._session.state is State.UP:
                connection.leave_soon()

    # --- the engine ----------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            for served in self.attempts.all():
                if not served.committed or served.ended or served.paused or self.hangs:
                    continue
                for choice in served.choices:
                    served.add(choice)
                if served.complete:
                    served.end(Outcome.ATTEMPT_OUTCOME_DONE)
                elif served.log.full:
                    served.paused = True

    def _credited(self, served: Served) -> None:
        if served.paused and not served.log.full:
            served.paused = False

    async def _cancel(self, served: Served) -> None:
        if served.task is not None:
            served.task.cancel()
        await asyncio.sleep(self.network.random.choice((0.0, 0.0, 0.05, 0.5)))
        served.end(Outcome.ATTEMPT_OUTCOME_CANCELLED)

    # --- calls ---------------------------------------------------------------------------------------------

    async def cancel(self, transfer_id: bytes) -> bool:
        served = self.attempts.get(transfer_id)
        if served is None:
            self.attempts.remember_ended(transfer_id)
            return False
        await self.attempts.cancel(served)
        return True

    async def run(self, request: Any) -> None:
        if self.attempts.get(request.transfer_id) is not None:
            return
        served = self._open(request.transfer_id, request.handle, request.spec)
        if isinstance(request, decode_pb2.DecodeRunRequest):
            served.committed = True
        else:
            served.task = asyncio.get_running_loop().create_task(self._prefill(served, request))

    def _open(
        self, transfer_id: bytes, reference: common_pb2.HandleRef, spec: common_pb2.GenerateSpec
    ) -> Served:
        return self.attempts.open(transfer_id, reference, spec, lambda log: Served(transfer_id, log, spec))

    async def _prefill(self, served: Served, request: prefill_pb2.PrefillRunRequest) -> None:
        peer, delay = self.peer, self.network.delay
        assert peer is not None, "a prefill worker"
        landed: Served | None = None
        try:
            if ends_with_first_token(request.spec):
                await asyncio.sleep(0.05)
                for choice in served.choices:
                    served.add(choice)
                served.end(Outcome.ATTEMPT_OUTCOME_DONE)
                return
            await asyncio.sleep(delay())
            landed = peer._open(request.transfer_id, request.decode_handle, request.spec)
            await asyncio.sleep(self.network.random.choice((0.01, 0.1, 0.4)))
            for choice in served.choices:
                served.add(choice)
            await asyncio.sleep(delay())
            if landed.ended or peer.attempts.get(request.transfer_id) is not landed:
                raise PeerLostError("the hand-off has ended")
            landed.committed = True
            for choice in landed.choices:
                landed.add(choice)
            await asyncio.sleep(delay())
            served.end(Outcome.ATTEMPT_OUTCOME_DONE)
        except asyncio.CancelledError:
            if landed is not None and not landed.committed:
                landed.end(Outcome.ATTEMPT_OUTCOME_ABORTED)
            served.end(Outcome.ATTEMPT_OUTCOME_CANCELLED)
        except Exception:
            served.end(Outcome.ATTEMPT_OUTCOME_ABORTED, PeerLostError("no hand-off"))

    async def abort(self, transfer_id: bytes) -> decode_pb2.AbortResponse:
        served = self.attempts.get(transfer_id)
        if served is not None and served.committed:
            return decode_pb2.AbortResponse(state=decode_pb2.ATTEMPT_STATE_COMMITTED)
        self.attempts.remember_ended(transfer_id)
        if served is not None:
            served.end(Outcome.ATTEMPT_OUTCOME_ABORTED)
        return decode_pb2.AbortResponse(state=decode_pb2.ATTEMPT_STATE_ABORTED)

    def drain(self) -> None:
        """Return everything, at its position."""
        for served in self.attempts.all():
            if self.role == "decode":
                outcome = "PREEMPTED" if served.committed else "ABORTED"
                served.end(Outcome.Value(f"ATTEMPT_OUTCOME_{outcome}"), DrainingError("is leaving"))

    async def close(self) -> None:
        self.stepping.cancel()
        await asyncio.gather(self.stepping, return_exceptions=True)
        for connection in list(self.open):
            connection.abort()
        await self.attempts.close()


class VirtualChannels:
    """Implements what an attempt uses of router.dispatch.channels.Channels."""

    def __init__(self, network: Network, workers: dict[str, VirtualWorker]):
        self._network, self._workers = network, workers

    def decode(self, address: str, *, control: bool = False) -> _Stub:
        return _Stub(self._network, self._workers[address])

    prefill = decode


class _Stub:
    def __init__(self, network: Network, worker: VirtualWorker):
        self._network, self._worker = network, worker

    def _calls(self, call: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda request, timeout: self._network.call(
            self._worker.worker_id, lambda: call(request), timeout
        )

    @property
    def Run(self) -> Callable[..., Any]:
        return self._calls(self._worker.run)

    @property
    def Cancel(self) -> Callable[..., Any]:
        return self._calls(lambda request: self._worker.cancel(request.transfer_id))

    @property
    def Abort(self) -> Callable[..., Any]:
        return self._calls(lambda request: self._worker.abort(request.transfer_id))
