"""Which of the processes that append to one log at the same time appends next.

Without an order, the winner of a race tends to win the next one, because it does not have to read first. The log itself
shows which processes compete: a process that has lost a race, or has waited for others, sets a flag in its commit.
From then on it has turns, in the order of the ids, until it does not use one. All processes read the same log, so they
agree. A turn is only a hint; the append decides. A process without competitors never waits.
"""

from __future__ import annotations

from bisect import bisect


class AppendOrder:
    """The processes that have turns, as of the last commit that was read."""

    def __init__(self, writer: str) -> None:
        self.last = ""
        """The writer of the last commit."""

        self._writer = writer
        self._ring: list[str] = []

    def note(self, writer: str, *, competes: bool) -> None:
        """Apply the next commit: its writer, and whether the writer had to wait for others."""
        if competes or writer in self._ring:
            # The processes between the last writer and this one did not use their turns.
            passed = {*self._between(self.last, writer), writer}
            self._ring = sorted([writer, *(each for each in self._ring if each not in passed)])
        self.last = writer

    def before_own(self) -> int:
        """The number of processes whose turns come before that of this process."""
        return len([each for each in self._between(self.last, self._writer) if each != self.last])

    def _between(self, last: str, writer: str) -> list[str]:
        """The processes whose turns come after that of `last`, and before that of `writer`."""
        begin, end = bisect(self._ring, last), bisect(self._ring, writer)
        others = self._ring[begin:end] if last < writer else self._ring[begin:] + self._ring[:end]
        return [each for each in others if each != writer]
