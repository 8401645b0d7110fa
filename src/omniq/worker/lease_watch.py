"""Decides when an owner has lost its lease, as one pool sees it.

The store's clock says when a lease ends. That is wrong after a gap: a time in which no worker could reach
the store, so that none could renew, or in which the store's clock jumped. Then the leases of healthy
workers have ended, and the first one to come back would take their tasks. So after a gap a pool

- renews its own lease and records what has finished, before it takes anything;
- leaves an owner alone for one lease from when it first saw that its lease has ended, once for each owner.

Without a gap nothing is delayed. After one, the tasks of a worker that is really dead are taken within two
leases and a poll. Times are those of the boot clock of this machine, which never jumps.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

from omniq.clock import Clock, seconds_to_micros
from omniq.storage.types import Lease

_GAP = 0.5
"""A longer silence of the store, or jump of its clock, is a gap: the part of a lease.

A worker renews three times in a lease. So less than that does not end a lease that was renewed in time.
"""

_MARGIN, _SHORT_MARGIN, _ENOUGH_MARGIN = 0.1, 0.25, 0.5
"""A worker stops its runs some time before its lease expires: see `margin_of`.

That is a tenth of a long lease, a quarter of a short one, half a second in between. Stopping takes
time on a busy machine.
"""

_MOST_OWNERS = 10_000
"""How many owners are remembered: most of them have ended long ago, in the life of a pool."""

_REMEMBERED_LEASES = 4
"""How long an owner is remembered that was left alone, in leases."""


def margin_of(lease: float) -> float:
    """How many seconds before its end a worker no longer trusts its own lease."""
    return max(lease * _MARGIN, min(lease * _SHORT_MARGIN, _ENOUGH_MARGIN))


class LeaseWatch:
    """What one pool knows about the leases of all owners. Only `answered` is called by other threads."""

    def __init__(
        self,
        clock: Clock,
        lease: float,
        has_outcomes: Callable[[], bool],
        deaths: Mapping[int, str] = {},
    ) -> None:
        """`has_outcomes`: whether outcomes of this pool wait to be recorded.

        `deaths`: how processes of this machine ended, by their ids, as far as a supervisor has said it.
        """
        self._clock = clock
        self._lease = seconds_to_micros(lease)
        self._gap = seconds_to_micros(lease * _GAP)
        self._has_outcomes = has_outcomes
        self._lock = threading.Lock()
        self._last_answer = clock.boot_micros()
        self._gap_ended: int | None = None
        self._has_to_renew = False
        self._records_until: int | None = None
        self._offset: int | None = None
        self._first_seen: dict[str, int] = {}
        self._renewals: dict[str, tuple[int, int]] = {}
        self._host = socket.gethostname()
        self.owner = ""
        """The id of this pool's owner, which is always left alone."""
        self._deaths = deaths

    def had_to_wait(self) -> None:
        """The first connection was not made at the first try: so other workers may have lost theirs."""
        self._begin_after_gap(self._clock.boot_micros())

    def answered(self, *, is_renewal: bool = False) -> None:
        """The store has answered this pool. From any thread."""
        now = self._clock.boot_micros()
        with self._lock:
            silence, self._last_answer = now - self._last_answer, now
        if silence > self._gap:
            self._begin_after_gap(now)
        if is_renewal:
            self._has_to_renew = False

    def _begin_after_gap(self, now: int) -> None:
        self._gap_ended = now
        self._has_to_renew = True
        if self._records_until is None:
            # The next gap does not move it: a busy pool of a slow store has gaps and outcomes all the time,
            # and would never take the tasks of a dead worker.
            self._records_until = now + self._lease
        # No owner could renew in the gap.
        self._renewals = {}

    @property
    def may_recover(self) -> bool:
        """Whether this pool has done after the last gap what comes first."""
        if self._has_to_renew:
            return False
        if self._records_until is not None:
            if self._clock.boot_micros() < self._records_until and self._has_outcomes():
                return False
            self._records_until = None
        return True

    def _is_after_gap(self, now: int) -> bool:
        return self._gap_ended is not None and now - self._gap_ended <= self._lease

    def why_ended(self, lease: Lease) -> str | None:
        """Why the owner has lost its lease, so that its tasks may be taken; None if they may not."""
        # This call is itself an answer, perhaps one that a server gives after a long time.
        self.answered()
        now = self._clock.boot_micros()
        self._observe_store_clock(lease, now)
        if lease.owner == self.owner:
            return None
        if lease.is_live and not self._is_overdue(lease, now):
            self._first_seen.pop(lease.owner, None)
            return None
        return self._reason(lease) if self._may_be_taken(lease.owner, now) else None

    def _reason(self, lease: Lease) -> str:
        worker = lease.info
        if worker is not None and worker.host == self._host and worker.pid in self._deaths:
            return self._deaths[worker.pid]
        return "it did not renew its lease"

    def _observe_store_clock(self, lease: Lease, now: int) -> None:
        """A clock of the store that jumps ahead ends leases that are renewed in time: a gap."""
        if not lease.store_now:
            return
        before, self._offset = self._offset, lease.store_now - now
        if before is not None and self._offset - before > self._gap:
            self._begin_after_gap(now)

    def _is_overdue(self, lease: Lease, now: int) -> bool:
        """Whether it was not renewed for its whole length, although the store's clock calls it valid.

        That clock has been set back, and would call it valid for hours.
        """
        if not lease.length:
            return False
        until, since = self._renewals.get(lease.owner, (0, 0))
        if until != lease.until:
            if len(self._renewals) >= _MOST_OWNERS:
                self._renewals = {}
            self._renewals[lease.owner] = (lease.until, now)
            return False
        return now - since > lease.length

    def _may_be_taken(self, owner: str, now: int) -> bool:
        first = self._first_seen.get(owner)
        if first is None and not self._is_after_gap(now):
            return True
        if first is not None and now - first > self._lease:
            del self._first_seen[owner]
            return True
        if first is None:
            oldest = now - _REMEMBERED_LEASES * self._lease
            self._first_seen = {
                other: seen for other, seen in self._first_seen.items() if seen > oldest
            }
            self._first_seen[owner] = now
        return False
