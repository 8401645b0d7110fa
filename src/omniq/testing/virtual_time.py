"""An event loop on virtual time, and simulated machines on it that can be stopped and killed.

The loop never sleeps: when no callback is ready, its time moves to the next timer. The seed decides
which machine runs next; within one machine callbacks run in their order, as in a real process. A
callback belongs to a machine by its context, so killing a machine stops everything that it started,
between any two awaits, and no `finally` runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar

from omniq.clock import encode_id, from_micros, to_micros
from omniq.testing.clock import START

T = TypeVar("T")
M = TypeVar("M", bound="Machine")

_IDS_PER_MACHINE = 1 << 40
_TEAR_DOWN_ROUNDS = 50


class Deadlock(AssertionError):
    """No callback is ready and no timer is set, so what is still awaited can never happen."""


class VirtualClock:
    """The clocks of one machine: all run at the same speed, each with its own offset."""

    def __init__(self, loop: VirtualLoop, number: int, seed: int) -> None:
        self._loop = loop
        self._random = random.Random(seed)
        self._start = to_micros(START)
        self._ids = number * _IDS_PER_MACHINE
        self._boot_offset = self._random.randrange(1, 10**12)
        self.skew = timedelta()
        """How far the wall clock is ahead of the true time; may be changed at any time."""

    def now(self) -> datetime:
        return from_micros(self.micros())

    def micros(self) -> int:
        return self._start + round(self._loop.time() * 1e6) + self.skew // timedelta(microseconds=1)

    def boot_micros(self) -> int:
        return self._boot_offset + round(self._loop.time() * 1e6)

    def boot_id(self) -> str:
        return "boot-1"

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, future: asyncio.Future[None], seconds: float | None) -> bool:
        done, _ = await asyncio.wait((future,), timeout=seconds)
        return bool(done)

    def random(self) -> float:
        return self._random.random()

    def new_id(self) -> str:
        self._ids += 1
        return encode_id(self.micros() // 1000, self._ids)


class Machine:
    """A simulated process: its callbacks that are ready, and whether they may run."""

    def __init__(self, loop: VirtualLoop, name: str, number: int, seed: int) -> None:
        self.name = name
        self.clock = VirtualClock(loop, number, seed)
        self.main: asyncio.Task[Any] | None = None
        self.is_dead = False
        self._loop = loop
        self._pauses = 0
        self.ready: deque[asyncio.Handle] = deque()

    @property
    def is_running(self) -> bool:
        """Whether it is alive, not stopped, and its main function has not returned."""
        return not (self.is_dead or self._pauses or self.main is None or self.main.done())

    @property
    def has_ended(self) -> bool:
        """Whether it was killed, or its main function has returned or raised."""
        return self.is_dead or (self.main is not None and self.main.done())

    def kill(self) -> None:
        """SIGKILL: none of its code runs any more. Calls that it has sent still arrive."""
        self.is_dead = True
        self._loop.reference_all_tasks()

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`."""
        self._pauses += 1
        self._loop.call_later(seconds, self._resume, context=self._loop.world_context)

    def _resume(self) -> None:
        self._pauses -= 1

    @property
    def may_run(self) -> bool:
        """Whether its callbacks may run now."""
        return not (self.is_dead or self._pauses)

    def resume_for_teardown(self) -> None:
        """Let it run again, so that its tasks can be cancelled at the end of a simulation."""
        self.is_dead, self._pauses = False, 0


_current: contextvars.ContextVar[Machine] = contextvars.ContextVar("omniq_machine")


def current_machine() -> Machine:
    """The machine that this code runs on. Raises `LookupError` outside of a simulation."""
    return _current.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs the machines in an order that depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._now = 0.0
        self._draw = random.Random(seed)
        self._referenced: set[asyncio.Task[Any]] = set()
        self._machines: list[Machine] = []
        self._busy: list[Machine] = []
        self.steps = 0
        self.world_context = contextvars.Context()
        """The context of code outside all machines, which is never stopped."""
        world = self.add_machine("world", Machine)
        self.world_context.run(_current.set, world)

    def time(self) -> float:
        return self._now

    def add_machine(self, name: str, kind: type[M]) -> M:
        """Add a machine that runs nothing yet."""
        machine = kind(self, name, len(self._machines), self._draw.getrandbits(64))
        self._machines.append(machine)
        return machine

    def start(self, machine: Machine, main: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `main` on the machine."""
        context = contextvars.Context()
        context.run(_current.set, machine)
        machine.main = task = self.create_task(main, name=machine.name, context=context)
        return task

    def run_in_world(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` outside all machines until it ends, then cancel everything else."""
        task = self.create_task(main, name="world", context=self.world_context.copy())
        try:
            return self.run_until_complete(task)
        finally:
            self._tear_down()

    def reference_all_tasks(self) -> None:
        """Hold references to all tasks: garbage collection would close those of a dead machine."""
        self._referenced.update(asyncio.all_tasks(self))

    def _tear_down(self) -> None:
        for machine in self._machines:
            machine.resume_for_teardown()
        for _ in range(_TEAR_DOWN_ROUNDS):
            left = asyncio.all_tasks(self)
            if not left:
                break
            for task in left:
                task.cancel()
            self.run_until_complete(asyncio.wait(left, timeout=10))
        self._referenced.clear()
        self.close()

    # Methods that the base class requires

    def _run_once(self) -> None:
        self._dispatch_ready()
        machines = [machine for machine in self._busy if machine.may_run]
        if not machines:
            self._advance_time()
            return
        machine = machines[self._draw.randrange(len(machines))] if machines[1:] else machines[0]
        self.steps += 1
        handle = machine.ready.popleft()
        if not machine.ready:
            self._busy.remove(machine)
        if not handle.cancelled():
            handle._run()

    def _dispatch_ready(self) -> None:
        """Move the callbacks that are ready to their machines."""
        scheduled, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        while ready:
            handle = ready.popleft()
            if not handle._cancelled:
                machine: Machine = handle._context.get(_current, self._machines[0])
                if not machine.ready:
                    self._busy.append(machine)
                machine.ready.append(handle)

    def _advance_time(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
        if not scheduled:
            if self._stopping:  # type: ignore[attr-defined]
                return
            raise Deadlock(f"no callback is ready and no timer is set after {self._now:.6f} s")
        self._now = scheduled[0].when()

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps, so it needs no wakeup."""

    def _process_events(self, events: Any) -> None:
        """Do nothing: the loop has no files or sockets."""
