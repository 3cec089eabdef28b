"""Events of an attempt at its workers, for the task of its request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster import errors
from wire import common_pb2


class Source(Enum):
    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__  # Enum's is written in Python, and every token looks its source up


@dataclass(frozen=True)
class Ended:
    """An attempt's end at one worker as it reported it, or `error` when the worker was lost."""

    source: Source
    end: common_pb2.AttemptEnd | None
    error: errors.BatonError | None = None

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE

    @property
    def reason(self) -> errors.BatonError:
        """The error of an end that is not done."""
        if self.error is not None:
            return self.error
        if self.end is not None and self.end.HasField("error"):
            return errors.from_wire(self.end.error)
        return errors.PeerLostError(f"the {self.source.value} worker aborted the attempt")

    @property
    def had_no_room(self) -> bool:
        """Whether the decode worker had no room: it refused the request, or took its reservation back."""
        if self.end is None or self.end.outcome == common_pb2.ATTEMPT_OUTCOME_REFUSED:
            return self.end is not None
        return self.source is Source.DECODE and isinstance(self.reason, errors.BlocksExhaustedError)


@dataclass(frozen=True)
class Broken:
    """A worker sent what it may not, or what came cannot be read: nothing more is read of the attempt."""

    error: errors.BatonError


@dataclass(frozen=True)
class Complete:
    """Every choice has its end."""


Event = Ended | Broken | Complete
