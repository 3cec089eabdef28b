"""Serves one generation: admission, its body, its dispatch and its answer, whole or streamed.

An endpoint is a Reader: it reads a body and says with which Form its answer is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import BatonError, CancelledError, DrainingError, InvalidRequestError, OverloadedError
from router.admission.admission import HeldBytes, Place
from router.dispatch.dispatcher import RequestDispatcher
from router.dispatch.turn import Turn
from router.frontends.answer_queue import AnswerQueue
from router.frontends.answer_room import expect_answer
from router.frontends.http.answer_size import AnswerSize, answer_size
from router.frontends.http.connection.body import discard_body, read_json
from router.frontends.http.connection.exchange import Exchange, Written
from router.frontends.http.connection.long_body import LongResponse
from router.frontends.http.connection.protocol import KEEPS
from router.frontends.http.gate import caller_of, connection_of
from router.frontends.start_turn import start_turn
from router.gateway import RequestGateway
from router.observe.traces import Arrival
from router.request import model_hint
from router.request.completion import Completion, Delta, Outcome
from router.request.validator import MAX_REQUEST_ID

REQUEST_ID = "baton.request_id"  # in the scope of a request that was read: the one that its answer shows
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class WholeAnswer(Protocol):
    """Collects an answer that is sent at its end."""

    def add(self, deltas: Sequence[Delta]) -> None: ...

    def body(self, outcomes: Sequence[Outcome]) -> Sequence[bytes]:
        """JSON in pieces; call it once every choice has finished."""
        ...


class StreamedAnswer(Protocol):
    """Encodes an answer's events. Those of one call are all made before those of the next."""

    @property
    def kept(self) -> int:
        """Bytes of the answer so far that the last events repeat."""
        ...

    def of(self, deltas: Sequence[Delta]) -> Written:
        """The events of deltas that arrived together, for one write; the first call's begin the stream."""
        ...

    def end(self, outcomes: Sequence[Outcome]) -> Written:
        """The last events, once every choice has finished."""
        ...

    def failed(self, error: BatonError) -> Written:
        """The last events of a stream that an error ends."""
        ...


class Form(Protocol):
    """How one answer is written. `choices`: of all its prompts."""

    def whole(self, choices: int) -> WholeAnswer: ...

    def streamed(self, choices: int) -> StreamedAnswer: ...


@dataclass(frozen=True)
class ParsedRequest:
    """A request's completions, one per prompt, and how they are shown."""

    completions: list[Completion]
    stream: bool
    form: Form
    arrival: Arrival
    echo_bytes: int = 0  # of the body's fields, held until the answer has ended
    kept_whole: bool = False  # if it is streamed: its last events repeat all of it
    dimensions: int = 0  # of the vectors that are its answer

    @property
    def size(self) -> AnswerSize:
        """The size of the whole answer: each choice of a prompt repeats its fields."""
        return answer_size(self.completions, self.echo_bytes * self.completions[0].n, self.dimensions)

    @property
    def first_choices(self) -> list[int]:
        """The first choice of each completion, in the numbers of the whole answer."""
        return [sum(one.n for one in self.completions[:i]) for i in range(len(self.completions))]


# Takes places for a number of further prompts, if there is room for a number of bytes that their whole answer repeats.
# Raises OverloadedError.
Admit = Callable[[int, int], None]
NextTurn = Callable[[], Awaitable[None]]
Reader = Callable[[Exchange, Mapping[str, Any], Arrival, Admit], Awaitable[ParsedRequest]]


class Serving:
    """Serves the generations of all HTTP endpoints."""

    def __init__(self, gateway: RequestGateway):
        self.gateway = gateway
        self._turn = Turn()

    async def serve(self, request: Exchange, read: Reader) -> None:
        """Returns once the client has read the answer, but for what the connection's buffers take. Raises BatonError
        before the answer has begun."""
        caller, connection = caller_of(request), connection_of(request)

        def admit(prompts: int, repeated: int) -> None:
            place.body.check_room(repeated, place.model)
            self.gateway.admit_further(held, place, caller, connection, prompts)

        with contextlib.ExitStack() as held:
            place = await self.admit(held, request)
            # While its client does not read, only the answer's bytes are kept: what it is made of takes many times more.
            answer = await self._answer(request, read, place, admit)
            await (request.sent() if answer is None else self.deliver(request, answer, place))

    async def _answer(self, request: Exchange, read: Reader, place: Place, admit: Admit) -> Response | None:
        """An answer of known length; None: it was streamed."""
        parsed = await self._read(request, read, place, admit)
        request.scope[REQUEST_ID] = _shown_id(request, parsed)
        if parsed.kept_whole or not parsed.stream:
            # All prompts are for one model
            model = parsed.completions[0].served_model
            await expect_answer(self.gateway, caller_of(request), place, model, *parsed.size)
        else:
            place.body.keep(parsed.echo_bytes)
        with contextlib.ExitStack() as running:
            dispatchers = [
                running.enter_context(self.gateway.request(one, caller_of(request), first, parsed.arrival))
                for one, first in zip(parsed.completions, parsed.first_choices, strict=True)
            ]
            if request.has_left:
                await self._count_left(request, place.model)
            turns = self._turn, lambda: self.start_turn(request, place.model)
            if not parsed.stream:
                return await _whole(request, parsed, dispatchers, *turns)
            await _stream(request, parsed, place.body, dispatchers, *turns)
            return None

    async def _count_left(self, request: Exchange, model: str) -> None:
        """Its client has left while its request was prepared, which has cost as much as that of a refused one. Raises
        CancelledError."""
        async with self.gateway.counted(caller_of(request), model):
            raise CancelledError("the client disconnected")

    async def deliver(self, request: Exchange, answer: Response, place: Place) -> None:
        """Send an answer of known length; until its client has read it, it counts in the budget of bodies. Raises
        OverloadedError before it has begun."""
        size = answer.size if isinstance(answer, LongResponse) else len(answer.body)
        place.body.hold_answer(size, place.model)
        await request.send(answer)
        await request.sent()

    async def admit(self, held: contextlib.ExitStack, request: Exchange) -> Place:
        """A request's place, until `held` closes: once its answer has been sent. Raises DrainingError, OverloadedError."""
        caller = caller_of(request)
        try:
            place = held.enter_context(self.gateway.admission.admit(caller, connection_of(request)))
        except DrainingError:
            await discard_body(request, self.gateway.low_priority, caller.tenant)
            raise
        except OverloadedError:
            await self.gateway.low_priority.refuse(caller.tenant)
            raise
        held.enter_context(request.scope.get(KEEPS, contextlib.nullcontext)())
        return place

    async def _read(self, request: Exchange, read: Reader, place: Place, admit: Admit) -> ParsedRequest:
        """Read and check a request. Only the result keeps anything of the body in memory."""
        gateway, arrival = self.gateway, Arrival(request.headers.getlist)

        async def turn(raw: bytearray) -> None:
            nonlocal arrival
            arrival = Arrival(request.headers.getlist)  # its body is there
            await self.turn_to_parse(request, place, raw)

        body = await read_json(request, gateway.config, place.body, gateway.low_priority, turn)
        gateway.enter_model(place, caller_of(request), body.get("model"))
        return await read(request, body, arrival, admit)

    async def turn_to_parse(self, request: Exchange, place: Place, raw: bytearray) -> None:
        """Wait for the turn of a request whose body is there. Raises OverloadedError where its model has no place left,
        CancelledError if its client disconnects."""
        expected = ""
        if self.gateway.further:
            hint = model_hint.of_json(raw)
            expected = await self.gateway.expect_model(
                place, caller_of(request), hint, lambda: model_hint.names(raw, hint)
            )
        await self.start_turn(request, expected)

    async def start_turn(self, request: Exchange, model: str = "") -> None:
        """Wait for the tenant's turn to start a request, or one more prompt of this one, among those for `model`."""
        await start_turn(self.gateway, caller_of(request), model, request)


async def _whole(
    request: Exchange,
    parsed: ParsedRequest,
    dispatchers: Sequence[RequestDispatcher],
    turn: Turn,
    next_turn: NextTurn,
) -> Response:
    answer = parsed.form.whole(sum(one.choices for one in dispatchers))
    tenant = caller_of(request).tenant
    queue = AnswerQueue(request, answer.add, len(dispatchers), turn, tenant, streamed=False)
    await queue.pass_all(dispatchers, next_turn)
    outcomes = [dispatcher.outcome for dispatcher in dispatchers]
    shown = {
        "x-request-id": _shown_id(request, parsed),
        **timing_headers(outcomes[-1], admin=caller_of(request).admin),
    }
    return LongResponse(answer.body(outcomes), media_type="application/json", headers=shown)


async def _stream(
    request: Exchange,
    parsed: ParsedRequest,
    held: HeldBytes,
    dispatchers: Sequence[RequestDispatcher],
    turn: Turn,
    next_turn: NextTurn,
) -> None:
    """Until the first delta, a failure is an HTTP error; after it, an event of the stream. `held`: what the answer keeps
    until its end is counted there."""
    events = parsed.form.streamed(sum(one.choices for one in dispatchers))

    def write(deltas: Sequence[Delta]) -> None:
        frames = events.of(deltas)
        if not request.begun:
            shown_id = (b"x-request-id", _shown_id(request, parsed).encode("latin-1"))
            request.begin((shown_id, *_STREAM_HEADERS), frames)
        elif frames:
            request.write(frames)
        if kept := events.kept:
            held.grow_to(parsed.echo_bytes + kept)

    try:
        tenant = caller_of(request).tenant
        queue = AnswerQueue(request, write, len(dispatchers), turn, tenant, streamed=True)
        await queue.pass_all(dispatchers, next_turn)
    except BatonError as error:
        if not request.begun:
            raise
        await request.written()
        await request.end(events.failed(error))
    else:
        await request.written()
        await request.end(events.end([dispatcher.outcome for dispatcher in dispatchers]))


def _shown_id(request: Request, parsed: ParsedRequest) -> str:
    return request.headers.get("x-request-id") or parsed.completions[0].request_id


def id_of_failed(request: Request) -> str:
    """The id that the answer to a request shows that has failed: its own, or the one that the router gave it; "" = it has
    none yet."""
    if known := request.scope.get(REQUEST_ID):
        return str(known)
    with contextlib.suppress(InvalidRequestError):  # it was refused because of this
        if request_id(request):
            return request.headers["x-request-id"]
    return ""


def request_id(request: Request) -> str:
    """UTF-8 where the header is that, as over gRPC; else Latin-1. Raises InvalidRequestError."""
    given = request.headers.get("x-request-id", "")
    with contextlib.suppress(UnicodeDecodeError):
        given = given.encode("latin-1").decode()
    if len(given) > MAX_REQUEST_ID or not given.isprintable():
        message = f"x-request-id: at most {MAX_REQUEST_ID} printable characters in UTF-8"
        raise InvalidRequestError(message, field="x-request-id", limit=str(MAX_REQUEST_ID))
    return given


def timing_headers(outcome: Outcome, *, admin: bool) -> dict[str, str]:
    """Headers with the timings of a whole answer. `admin`: its client may see the workers."""
    timings = outcome.timings
    workers = {
        "x-baton-prefill-worker": _for_header(timings.prefill_worker),
        "x-baton-decode-worker": _for_header(timings.decode_worker),
    }
    return {
        **(workers if admin else {}),
        "x-baton-kv-bytes-shipped": str(timings.kv_bytes_shipped),
        "x-baton-total-seconds": f"{timings.total_seconds:.6f}",
    }


def _for_header(name: str) -> str:
    """A worker's name. A header has printable characters of ASCII: a name with others is escaped, as in a URL."""
    return name if name.isascii() and name.isprintable() else quote(name)
