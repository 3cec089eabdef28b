"""Every error that may cross a process border, in one tree.

BatonError
├── InvalidRequestError            400 INVALID_ARGUMENT    the request is wrong; `field` and `limit` say where
│   ├── UnknownModelError          404 INVALID_ARGUMENT
│   ├── UnsupportedFieldError      400 INVALID_ARGUMENT
│   ├── AdapterRefusedError        409 FAILED_PRECONDITION a worker does not load what a call names; `field` is its setting
│   └── ContextLengthError         400 INVALID_ARGUMENT
├── UnauthenticatedError           401 UNAUTHENTICATED     no API key, or not a valid one
├── ForbiddenError                 403 PERMISSION_DENIED   the key does not cover this
├── RequestTooLargeError           413 RESOURCE_EXHAUSTED
├── OverloadedError                429 RESOURCE_EXHAUSTED  try again after `retry_after_seconds`
├── UnavailableError               503 UNAVAILABLE         no worker of a role
│   ├── DrainingError                                      this process drains; another one serves the request
│   └── AttemptsExhaustedError                             several workers failed with it: the request may be the cause
├── DeadlineError                  504 DEADLINE_EXCEEDED
├── CancelledError                 499 CANCELLED
├── SetupError                     500 FAILED_PRECONDITION before any request is taken
│   ├── ConfigError                                        a flag, variable or file is wrong
│   ├── AdapterSlotsError                                  as many adapters are loaded as may be
│   └── ModelError                                         unknown architecture, missing tensor, wrong shape
├── HandoffError                   503 UNAVAILABLE         between workers; the router dispatches again
│   ├── WireVersionError                                   request of another wire version; names both
│   ├── LayoutMismatchError                                KV that can't be converted; names the field
│   ├── BlocksExhaustedError                               the decode worker has no room now
│   ├── AdapterMissingError                                the request's adapter is not loaded at this worker
│   ├── StaleEpochError                                    addressed to an earlier epoch of this worker
│   ├── StaleTransferError                                 an attempt that already ended
│   ├── DigestMismatchError                                corrupted twice
│   ├── PeerLostError                                      connection broken, or no beat for 5 s
│   └── TransportError                                     NIXL or gRPC could not move the bytes
└── InternalError                  500 INTERNAL            a fault in Baton
    ├── EngineRequestError                                 an engine failed on this request alone and keeps running
    │   ├── EngineBusyError        503 UNAVAILABLE         a worker's machine was too busy for this request
    │   └── DeadEndError           400 INVALID_ARGUMENT    the request's options leave no token
    │       └── GrammarDeadEndError                        its grammar leaves none, or takes too much to follow
    ├── EngineFailedError                                  an engine stopped in a step that ran this request
    └── UnreadableAnswerError                              the router cannot turn an answer's tokens into text or parts
"""

from __future__ import annotations

from typing import ClassVar

import grpc

from wire import common_pb2

# Limit of an error text between processes. Trailing metadata repeats it up to three times, and gRPC drops metadata above
# 8 KiB, and with it the error's class and field.
MAX_WIRE_BYTES = 800
MAX_RETRY_SECONDS = 86_400.0


def cut(text: str) -> str:
    """Shorten a text to MAX_WIRE_BYTES; error texts may repeat input of a client."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= MAX_WIRE_BYTES else raw[:MAX_WIRE_BYTES].decode(errors="ignore") + "…"


class BatonError(Exception):
    """Base of every error with a meaning outside its process.

    Attributes:
        field: the request field or setting concerned, or "".
        limit: the limit that was passed, as text, or "".
        retry_after_seconds: when trying again may help; 0 where unknown.
    """

    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    # Whether the text may name workers, addresses or code: routers log it and give clients the class's name only.
    internal: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str = "", limit: str = "", retry_after_seconds: float = 0.0):
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds

    @property
    def public_text(self) -> str:
        """Return the text that clients may read."""
        return type(self).__name__ if self.internal else self.message

    def to_wire(self) -> common_pb2.ErrorDetail:
        return common_pb2.ErrorDetail(
            code=type(self).__name__,
            message=cut(self.message),
            field=cut(self.field),
            limit=cut(self.limit),
            retryable=self.retryable,
            retry_after_seconds=self.retry_after_seconds,
        )


class InvalidRequestError(BatonError):
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class UnknownModelError(InvalidRequestError):
    http_status = 404


class UnsupportedFieldError(InvalidRequestError):
    pass


class AdapterRefusedError(InvalidRequestError):
    """A worker does not load what an administrator's call names (`field`: the worker's setting, or what of the files), or
    another call has unloaded it meanwhile."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 409


class ContextLengthError(InvalidRequestError):
    pass


class UnauthenticatedError(BatonError):
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class ForbiddenError(BatonError):
    grpc_status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class RequestTooLargeError(BatonError):
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 413


class OverloadedError(BatonError):
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True


class UnavailableError(BatonError):
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class DrainingError(UnavailableError):
    internal = True


class AttemptsExhaustedError(UnavailableError):
    # Otherwise a client would resume a request that kills workers at the next router, and kill as many again.
    retryable = False


class DeadlineError(BatonError):
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    retryable = True


class CancelledError(BatonError):
    grpc_status = grpc.StatusCode.CANCELLED
    http_status = 499


class SetupError(BatonError):
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION


class ConfigError(SetupError):
    pass


class ModelError(SetupError):
    pass


class AdapterSlotsError(SetupError):
    pass


class HandoffError(BatonError):
    internal = True
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class WireVersionError(HandoffError):
    retryable = False


class LayoutMismatchError(HandoffError):
    retryable = False


class BlocksExhaustedError(HandoffError):
    @property
    def public_text(self) -> str:
        return f"no decode worker had enough free KV blocks ({type(self).__name__})"


class AdapterMissingError(HandoffError):
    @property
    def public_text(self) -> str:
        return f"no worker has the adapter of this model loaded ({type(self).__name__})"


class StaleEpochError(HandoffError):
    pass


class StaleTransferError(HandoffError):
    retryable = False


class DigestMismatchError(HandoffError):
    pass


class PeerLostError(HandoffError):
    pass


class TransportError(HandoffError):
    pass


class InternalError(BatonError):
    internal = True


class EngineRequestError(InternalError):
    """The computation of one request failed in an engine; its other requests go on."""

    # The fault may lie in one worker's memory or cache: the router tries one other engine.
    retryable = True
    internal = False


class EngineBusyError(EngineRequestError):
    """Work for one request did not get the processor in time. The request is not the cause: it may be sent again."""

    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadEndError(EngineRequestError):
    """The request's options leave no token that may come next. Every engine would fail in the same way."""

    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    retryable = False


class GrammarDeadEndError(DeadEndError):
    """The request's grammar and its other options allow no token, or the grammar takes more time or memory to follow than
    a worker allows."""


class EngineFailedError(InternalError):
    """An engine failed in a step that ran this request, and its worker ends."""

    retryable = True
    internal = False


class UnreadableAnswerError(InternalError):
    """The tokens of one request's answer cannot be turned into text or parts. A further attempt would fail in the same
    way."""

    internal = False


def engine_request_error(error: Exception) -> EngineRequestError:
    """Wrap an exception raised by the engine's work for one request; an EngineRequestError is returned as it is."""
    if isinstance(error, EngineRequestError):
        return error
    wrapped = EngineRequestError(f"the request failed in the engine: {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def _all_subclasses(cls: type[BatonError]) -> list[type[BatonError]]:
    return [cls] + [deep for sub in cls.__subclasses__() for deep in _all_subclasses(sub)]


_BY_NAME = {cls.__name__: cls for cls in _all_subclasses(BatonError)}


def from_wire(detail: common_pb2.ErrorDetail) -> BatonError:
    """The error a peer reported; a class this build does not know becomes InternalError. A time that is none counts as
    unknown: it is waited for, and passed on to clients as a whole number."""
    cls = _BY_NAME.get(detail.code, InternalError)
    retry = detail.retry_after_seconds
    return cls(
        detail.message,
        field=detail.field,
        limit=detail.limit,
        retry_after_seconds=retry if 0.0 <= retry <= MAX_RETRY_SECONDS else 0.0,
    )


class IllegalTransition(AssertionError):
    """A state machine was asked for a step its table does not have: a fault in Baton, never a peer's."""


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Choose a typed error among exceptions of tasks that failed together."""
    typed = group.subgroup(BatonError) or group
    first: BaseException = typed.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
