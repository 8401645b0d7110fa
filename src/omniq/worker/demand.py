"""Decides when a pool claims, and how many tasks: a state machine without I/O.

    wake-up (from every state)
        |
        v      claim sent                 short reply, and no wake-up
    +--------+ ------------> +---------+  since the claim was sent     +------+
    | WANTED |               | CLAIMED | ----------------------------> | IDLE |
    +--------+ <------------ +---------+                               +------+
        ^       full reply                                                 |
        |                                                                  |
        +------------------------------------------------------------------+
                                    wake-up

WANTED: tasks may be due, and no claim has been sent since there was a reason to think so.
CLAIMED: a claim was sent. Its reply decides: a full one means that there may be more.
IDLE: the storage had fewer tasks than the claim asked for. Nothing is due.

The events, and the method that the loop calls for each:

- a wake-up arrived, the polling interval elapsed, a back-off ended, the lease was lost, or a task
  finished that others waited for at a gate: `wake_up()`, WANTED;
- a call that claims was sent: `sent(call)`, WANTED becomes CLAIMED;
- it returned as many tasks as it asked for: `replied(call, n, now)`, CLAIMED becomes WANTED;
- it returned fewer, or none: `replied(call, n, now)`, IDLE, also from WANTED if another call in
  flight had a full reply before. If a wake-up arrived since the call was sent, the state does not
  change;
- it failed: `failed(call)`, no change. `wake_up()` follows when the loop has backed off;
- an operator paused the worker: `pause()`, no claim in any state; resumed it: `resume()`, WANTED;
- an operator changed the number of slots: `resize(slots, most)`, WANTED;
- a slot is free: no method. `claimable()` receives the number of running tasks.

Two rules prevent a lost wake-up. The number of wake-ups is compared with the number at the time
the claim was sent: the claim may have reached the storage before the task did, so its short reply
must not hide the task. And a wake-up always leads to WANTED, whatever is in flight.

Two rules prevent spinning. IDLE is left only by a wake-up. And while the last reply was short, only
one claim is in flight: its reply says whether a second one is worth a round trip.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from omniq.models import Runnable

_IMMEDIATE = 0.001
"""Seconds. A wait that ended sooner did not wait: the wake-up was there before it."""

_MANY_SLOTS = 16
"""With fewer slots one call claims for all of them; dividing them would only add round trips."""

_EMPTY_WAKEUPS = 3
_EMPTY_WAKEUP_PAUSE = 0.02
"""After more than that many immediate wake-ups in a row without a task, the listener pauses."""


def most_per_call(concurrency: int, calls: int) -> int:
    """The number of tasks that one call claims at most, when that many are under way."""
    is_divided = calls > 1 and concurrency >= _MANY_SLOTS
    return -(-concurrency // calls) if is_divided else concurrency


class DemandState(Enum):
    """Whether the pool wants to claim: see the diagram above."""

    WANTED = "wanted"
    CLAIMED = "claimed"
    IDLE = "idle"


class Order(NamedTuple):
    """What a call is to claim: up to `most` tasks of these queues and functions."""

    most: int
    queues: tuple[str, ...] | None
    runnable: Runnable


class Call:
    """One call to the storage: it records `outcomes` outcomes and claims up to `claims` tasks.

    Until the reply arrives, it occupies slots: those of the outcomes, which the storage still counts
    as claims of this worker, or those of the tasks that it claims, whichever are more.
    """

    __slots__ = ("cancelled", "claims", "slots", "wakeups")

    def __init__(self, claims: int, outcomes: int) -> None:
        self.claims = claims
        self.slots = max(claims, outcomes)
        self.wakeups = 0
        """How many wake-ups had arrived when the call was sent."""
        self.cancelled: list[str] = []
        """The tasks that were cancelled since: the reply may bring them."""


class Demand:
    """Answers "may the loop claim now, and how many?" for `concurrency` slots.

    No call claims more than `most_per_call` tasks. Times are seconds of a monotonic clock, passed
    in by the caller.
    """

    def __init__(self, *, concurrency: int, most_per_call: int, poll_interval: float) -> None:
        self._concurrency = concurrency
        self._most_per_call = most_per_call
        self._poll_interval = poll_interval
        self._is_full = False
        self._is_paused = False
        self._wakeups = 0
        self._last_reply_at = -poll_interval
        self._last_claimed = 0
        self._empty_wakeups = 0
        self.state = DemandState.WANTED
        self.in_flight: set[Call] = set()
        """The calls that were sent and have not been answered, also those that only record."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due, as far as the pool knows."""
        return self.state is DemandState.IDLE

    @property
    def is_wanted(self) -> bool:
        """Whether a claim is wanted and has not been sent, for example because no slot is free."""
        return self.state is DemandState.WANTED

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused this worker."""
        return self._is_paused

    def claimable(self, running: int, *, even_if_idle: bool = False) -> int:
        """How many tasks the next call may claim; 0 when it should claim none.

        `running` is the number of slots with a running task. `even_if_idle` is for a caller that
        must know that the queue is empty now, not as of the last claim.
        """
        if self._is_paused or (self.state is DemandState.IDLE and not even_if_idle):
            return 0
        if not self._is_full and any(call.claims for call in self.in_flight):
            return 0
        occupied = running + sum(call.slots for call in self.in_flight)
        return max(0, min(self._concurrency - occupied, self._most_per_call))

    # Events

    def wake_up(self) -> None:
        """Tasks may be due: claim again, even if a claim in flight returns too few."""
        self.state = DemandState.WANTED
        self._wakeups += 1

    def sent(self, call: Call) -> None:
        """The call is on its way. A wake-up from now on requires another claim."""
        if call.claims and self.state is DemandState.WANTED:
            self.state = DemandState.CLAIMED
        call.wakeups = self._wakeups
        self.in_flight.add(call)

    def replied(self, call: Call, claimed: int, now: float) -> None:
        """The storage has answered the call with that many claimed tasks."""
        self.in_flight.discard(call)
        if not call.claims:
            return
        self._is_full = claimed == call.claims
        self._last_reply_at = now
        self._last_claimed = claimed
        if self._is_full:
            # In IDLE another claim has come back short since this one was sent. The storage sends
            # a wake-up for tasks that became due between the two.
            if self.state is DemandState.CLAIMED:
                self.state = DemandState.WANTED
        elif call.wakeups == self._wakeups:
            self.state = DemandState.IDLE

    def failed(self, call: Call) -> None:
        """The call has raised. `wake_up` follows when the caller has backed off."""
        self.in_flight.discard(call)

    def resize(self, concurrency: int, most_per_call: int) -> None:
        """The number of slots has changed. Tasks that run already keep theirs."""
        self._concurrency = concurrency
        self._most_per_call = most_per_call
        self.wake_up()

    def pause(self) -> None:
        """Claim nothing until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Claim again, if the worker was paused."""
        if self._is_paused:
            self._is_paused = False
            self.wake_up()

    # Polling

    def until_poll(self, now: float) -> float:
        """Seconds until a polling interval has elapsed since the last reply; negative if it has."""
        return self._last_reply_at + self._poll_interval - now

    def pause_before_wakeup(self, waited: float) -> float:
        """Seconds to wait before a wake-up is passed on that arrived after `waited` seconds.

        A storage that reports due tasks again and again, which no claim of this worker returns,
        must not keep it busy.
        """
        is_empty = waited < _IMMEDIATE and not self._last_claimed
        self._empty_wakeups = self._empty_wakeups + 1 if is_empty else 0
        return _EMPTY_WAKEUP_PAUSE if self._empty_wakeups > _EMPTY_WAKEUPS else 0.0
