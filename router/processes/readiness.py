"""Whether all processes of a router are ready, from what each has written to the shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.protocol.times import SUSPECT_SECONDS
from router.processes.memory import SharedMemory, Slot


def why_not_ready(memory: SharedMemory, known: Mapping[int, Sequence[str]] | None = None) -> list[str]:
    """Reasons of all processes, each with the process's number, or without if all of them have it.

    `known`: newer reasons than those in memory, by process. Nothing is waited for: a process that is stopped, or whose
    event loop stands still, is found by its last beat.
    """
    found = [
        list(known[index]) if known is not None and index in known else _reasons(slot)
        for index, slot in enumerate(memory.slots())
    ]
    common = [reason for reason in found[0] if all(reason in reasons for reasons in found)]
    own = [
        f"process {index}: {reason}"
        for index, reasons in enumerate(found)
        for reason in reasons
        if reason not in common
    ]
    return common + own


def _reasons(slot: Slot) -> list[str]:
    silent = slot.silent_seconds()
    if silent is None:
        return ["it is being started"]
    if silent > SUSPECT_SECONDS:
        return [f"it has been silent for {silent:.0f} s"]
    return slot.read_status()
