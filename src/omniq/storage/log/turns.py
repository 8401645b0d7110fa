"""Turns of the processes that append to one log at the same time.

Without turns, the process that has just won also wins the next race, since it need not read first. The log
itself says who competes: a process that has lost a race, or has waited for others, says so in its commit, and
from then on has a turn, in the order of the ids, until it lets one pass. All processes read the same log, so
they agree. A turn is only a hint, and the append decides. A process that competes with no other never waits.
"""

from __future__ import annotations

from bisect import bisect


class Turns:
    """Who has turns, as of the last commit that was read."""

    def __init__(self, writer: str) -> None:
        self.last = ""
        """The writer of the last commit."""

        self._writer = writer
        self._ring: list[str] = []

    def note(self, writer: str, *, competes: bool) -> None:
        """Read the next commit: its writer, and whether that had to wait for others."""
        if competes or writer in self._ring:
            # Those between the last writer and this one have let their turns pass.
            passed = {*self._between(self.last, writer), writer}
            self._ring = sorted([writer, *(each for each in self._ring if each not in passed)])
        self.last = writer

    def before_own(self) -> int:
        """How many others have their turn before this process."""
        return len([each for each in self._between(self.last, self._writer) if each != self.last])

    def _between(self, last: str, writer: str) -> list[str]:
        """Those whose turns come after that of `last`, and before that of `writer`."""
        begin, end = bisect(self._ring, last), bisect(self._ring, writer)
        others = self._ring[begin:end] if last < writer else self._ring[begin:] + self._ring[:end]
        return [each for each in others if each != writer]
