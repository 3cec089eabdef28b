"""Stop strings across token borders: holds back any text that may begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What may be shown. After a stop string nothing more is; `stopped` says so."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            # The one that is complete first; of several complete at once, the one that begins first.
            at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self.stopped = True
            shown, self._held = self._held[: at + (len(stop) if self._include else 0)], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def _overlap(self, stop: str) -> int:
        """The longest end of what is held that begins `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0

    def flush(self) -> str:
        """The answer ended otherwise: what was held back is text after all."""
        held, self._held = self._held, ""
        return "" if self.stopped else held
