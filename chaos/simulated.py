"""A fleet on virtual time under random faults, all drawn from one seed.

python -m chaos.simulated 7            # one seed, with all details
python -m chaos.simulated 0 5000       # many, printing those that fail
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec

from chaos.checker import Promises, check
from chaos.history import Event, Journal, current
from chaos.observers import observe_lease, observe_pool
from chaos.producer import KINDS, Producer, controlled
from chaos.store_reader import read_store
from chaos.tasks import Plan, tick
from chaos.verdict import Verdict
from omniq.errors import InvalidValue, OmniqError, StorageError
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.settings import Settings
from omniq.testing.faults import Verb
from omniq.testing.simulation import Faults, Process, Reply, Simulation
from omniq.worker import AsyncWorkerPool

LONGEST_DRAIN = 900.0
_PAUSE_CHANCE = 0.2


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of one seed: the size of its fleet, and the faults it meets."""

    workers: int
    concurrency: int
    lease: float
    poll: float
    max_crashes: int
    tasks: int
    seconds: float
    faults: Faults
    kills: int
    pauses: int
    stops: int
    cuts: int
    jumps: int
    slow_cuts: int
    schedules: int
    controlled: float
    """The share of tasks that test flow control. If all do, most of them come together."""
    kinds: tuple[str, ...]

    @classmethod
    def drawn(cls, draw: random.Random) -> Conditions:
        """Draw few or many faults: combinations find what single faults do not."""

        def some(most: int, chance: float = 0.6) -> int:
            return draw.randint(1, most) if draw.random() < chance else 0

        lease = draw.choice((2.0, 5.0, 10.0))
        is_flaky, is_slow = draw.random() < 0.6, draw.random() < 0.4
        faults = Faults(
            refused=draw.choice((0.005, 0.03, 0.1)) if is_flaky else 0.0,
            lost_reply=draw.choice((0.005, 0.03, 0.1)) if is_flaky else 0.0,
            slow=draw.choice((0.005, 0.05)) if is_slow else 0.0,
            slow_seconds=lease * draw.choice((0.3, 0.8, 2.0)),
            patience=draw.choice((0.5, 2.0, lease)),
            wakeups=draw.random() < 0.7,
            skew=draw.choice((0.0, 0.0, 0.5, 5.0)),
        )
        return cls(
            workers=draw.randint(1, 4),
            concurrency=draw.choice((1, 2, 5)),
            lease=lease,
            poll=draw.choice((0.5, 1.0, 3.0)),
            max_crashes=draw.choice((1, 3, 30)),
            tasks=draw.randint(5, 40),
            seconds=draw.uniform(10, 60),
            faults=faults,
            kills=some(6),
            pauses=some(5),
            stops=some(3, 0.3),
            cuts=some(4, 0.4),
            jumps=some(2, 0.2),
            slow_cuts=some(3, 0.3),
            schedules=some(2, 0.4),
            controlled=draw.choice((0.0, 0.5, 1.0)),
            kinds=tuple(draw.sample(KINDS, draw.choice((1, 2, len(KINDS))))),
        )


class Fleet:
    """Producers, workers and their faults, from one seed, and the events they recorded."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"fleet {seed}")
        self.conditions = Conditions.drawn(self.draw)
        settings = Settings(result_ttl=1e6, max_crashes=self.conditions.max_crashes)
        self.simulation = Simulation(seed, faults=self.conditions.faults, settings=settings)
        self.events: list[Event] = []
        self._is_over = False
        self._started = 0
        self._stop_requests: dict[str, asyncio.Future[float | None]] = {}
        self.simulation.network.observers.append(self._watch_store)

    def run(self) -> Verdict:
        """Run from the first enqueue to the last outcome; return the checker's verdict."""
        try:
            self.simulation.run(lambda _: self._run_fleet())
        finally:
            self._is_over = True
        promises = Promises(
            max_crashes=self.conditions.max_crashes,
            drain=LONGEST_DRAIN,
            skew=self.conditions.faults.skew * 2 + 1e-6,
            no_zombies=True,
        )
        return check(self.events, promises)

    # The store and the journals

    def journal(self, by: str) -> Journal:
        return Journal(by, self._note, lambda: self.simulation.loop.time())

    def _note(self, event: Event) -> None:
        if not self._is_over:
            self.events.append(event)

    def _watch_store(self, by: str, verbs: Sequence[Verb], value: Any, kind: Reply) -> None:
        if "reserve" in verbs and kind in ("ok", "lost"):
            for row in value[1].rows:
                self._note(
                    Event(self.simulation.seconds, by, "store.claim", row.id, row.token, row.owner)
                )

    # The run

    async def _run_fleet(self) -> None:
        conditions = self.conditions
        for _ in range(conditions.workers):
            self._start_worker()
        self.simulation.start("producer", self._produce)
        if conditions.schedules:
            self.simulation.start("planner", self._plan_schedules)
        await self._inject_faults()
        await self._calm_down()
        await read_store(self.simulation.store, self.journal("reader"))

    async def _inject_faults(self) -> None:
        """Inject all faults of the conditions, at random instants."""
        conditions, draw = self.conditions, self.draw
        faults = [
            *[self._kill] * conditions.kills,
            *[self._pause] * conditions.pauses,
            *[self._terminate] * conditions.stops,
            *[self._cut] * conditions.cuts,
            *[self._advance_time] * conditions.jumps,
            *[self._slow_then_cut] * conditions.slow_cuts,
        ]
        draw.shuffle(faults)
        instants = sorted(draw.uniform(0, conditions.seconds) for _ in faults)
        for at, inject in zip(instants, faults, strict=True):
            await asyncio.sleep(at - self.simulation.seconds)
            inject()
        await asyncio.sleep(conditions.seconds - self.simulation.seconds)

    async def _calm_down(self) -> None:
        """End all faults, make sure that a worker runs, and wait until the queue is drained."""
        network = self.simulation.network
        network.faults = Faults(wakeups=self.conditions.faults.wakeups)
        if not any(process.is_running for process in self._workers()):
            self._start_worker()
        self.journal("nemesis").note("calm")
        deadline = self.simulation.seconds + LONGEST_DRAIN
        while not await self._is_drained():
            if self.simulation.seconds > deadline:
                return
            await asyncio.sleep(1.0)

    async def _is_drained(self) -> bool:
        stats = await self.simulation.store.stats()
        left = sum(count for status, count in stats.by_status.items() if not status.is_final)
        started = (self.simulation.machines.get(name) for name in ("producer", "planner"))
        schedules = await self.simulation.store.list_schedules()
        is_done = all(process is None or process.has_ended for process in started)
        return is_done and left == 0 and all(one.next_at is None for one in schedules)

    # Faults

    def _workers(self) -> list[Process]:
        machines = self.simulation.machines.values()
        return [machine for machine in machines if machine.name.startswith("worker")]

    def _victim(self) -> Process | None:
        alive = [
            process
            for process in self._workers()
            if process.is_running and not self._stop_requests[process.name].done()
        ]
        return self.draw.choice(alive) if alive else None

    def _note_fault(self, what: str, victim: Process, seconds: float = 0.0) -> None:
        self.journal("nemesis").note(what, value=victim.name, until=seconds)

    def _kill(self) -> None:
        if (victim := self._victim()) is not None:
            self._note_fault("kill", victim)
            victim.kill()
            self._start_worker(self.draw.uniform(0, self.conditions.lease * 2))

    def _pause(self) -> None:
        if (victim := self._victim()) is not None:
            seconds = self.draw.choice((0.1, 0.5, 1.0, 1.5, 3.0)) * self.conditions.lease
            self._note_fault("stop", victim, seconds)
            victim.pause(seconds)

    def _terminate(self) -> None:
        if (victim := self._victim()) is not None:
            self._note_fault("term", victim)
            self._stop_requests[victim.name].set_result(self.draw.choice((None, 0.5, 5.0)))
            self._start_worker(self.draw.uniform(0, self.conditions.lease))

    def _cut(self) -> None:
        seconds = self.draw.choice((0.2, 0.6, 1.5)) * self.conditions.lease
        victim = self._victim() if self.draw.random() < 0.5 else None
        self.simulation.network.cut(seconds, victim)
        self.journal("nemesis").note("cut", value=victim and victim.name, until=seconds)

    def _slow_then_cut(self) -> None:
        """Slow a worker's calls down and then drop them: its lease expires while it works."""
        if (victim := self._victim()) is not None:
            lease, network = self.conditions.lease, self.simulation.network
            seconds = self.draw.uniform(0.5, 2) * lease
            network.slow(seconds, victim, lease * self.draw.uniform(0.05, 0.2))
            cut = partial(network.cut, 2 * lease, victim)
            self.simulation.loop.call_later(
                seconds, cut, context=self.simulation.loop.world_context
            )
            self._note_fault("cut", victim, seconds + 2 * lease)

    def _advance_time(self) -> None:
        if (victim := self._victim()) is not None:
            skew = self.conditions.faults.skew or 1.0
            victim.clock.skew = timedelta(seconds=round(self.draw.uniform(-skew, skew), 6))

    # Processes

    def _start_worker(self, after: float = 0.0) -> None:
        self._started += 1
        name = f"worker-{self._started}"

        async def work_until_stopped(process: Process) -> None:
            await asyncio.sleep(after)
            await self._work(process)

        self._stop_requests[name] = self.simulation.loop.create_future()
        self.simulation.start(name, work_until_stopped)

    async def _work(self, process: Process) -> None:
        journal = self.journal(process.name)
        current.set(journal)
        observe_lease(process.storage, journal)
        conditions, stop = self.conditions, self._stop_requests[process.name]
        while True:
            pool = AsyncWorkerPool(
                process.storage,
                conditions.concurrency,
                conditions.poll,
                0.2,
                lease=conditions.lease,
                loop_patience=4.0,
            )
            observe_pool(pool, journal)
            try:
                await pool.start()
                timeout = await stop
                await pool.stop(timeout, cancel_in_flight=timeout is None)
                return
            except OmniqError:
                # Start again after a pause, as a supervisor would.
                if stop.done():
                    return
                await asyncio.sleep(0.5)

    async def _produce(self, process: Process) -> None:
        draw = random.Random(f"plans {self.simulation.seed}")
        producer = Producer(process.storage, self.journal(process.name), draw)
        await _persist(process.storage.open)
        for number in range(self.conditions.tasks):
            if self.conditions.controlled < 1 or draw.random() < _PAUSE_CHANCE:
                await asyncio.sleep(
                    draw.uniform(0, 2) * self.conditions.seconds / self.conditions.tasks
                )
            await producer.enqueue(f"t{number:03}", self._plan(draw, number))
            if draw.random() < 0.1:
                await producer.cancel()
            if draw.random() < 0.1:
                await producer.retry_dead()
            if draw.random() < 0.1:
                await producer.change_limit()

    def _plan(self, draw: random.Random, number: int) -> Plan:
        lease = self.conditions.lease
        seconds = draw.choice((0.0, 0.01, 0.3, 1.0, lease, lease * 2.5))
        if draw.random() < self.conditions.controlled:
            fields = controlled(draw, self.conditions.kinds)
            # A call that replaces another also forgets its failures.
            failures = int(draw.random() < 0.2 and "replaces" not in fields)
            return Plan(seconds=seconds, failures=failures, text=f"argument {number}", **fields)
        kind = draw.randrange(12)
        return Plan(
            seconds=seconds,
            failures=draw.choice((1, 2, 9)) if kind == 0 else 0,
            max_retries=draw.choice((2, 5)),
            fatal=kind == 1,
            snoozes=1 if kind == 2 else 0,
            steps=draw.randint(1, 5) if kind == 3 else 0,
            eta=self.simulation.seconds + draw.uniform(0, 20) if kind == 4 else 0.0,
            unique=draw.choice(("u1", "u2")) if kind == 5 else "",
            group={6: "g", 7: "g", 8: "r"}.get(kind, ""),
            width=2 if kind in (6, 7, 8) else 0,
            span=3.0 if kind == 8 else 0.0,
            text=f"argument {number}",
        )

    async def _plan_schedules(self, process: Process) -> None:
        # A wrong clock would add schedules with wrong times, which is not tested here.
        process.clock.skew = timedelta()
        await _persist(process.storage.open)
        queue = AsyncTaskQueue(process.storage)
        for number in range(self.conditions.schedules):
            every = self.draw.choice((3, 7, 11))
            start = process.clock.now() + timedelta(seconds=30)
            add = partial(
                queue.schedules.add,
                f"s{number}",
                tick,
                interval=timedelta(seconds=every),
                start=start,
                end=start + timedelta(seconds=self.conditions.seconds),
                missed="all",
                max_missed=1000,
            )
            await _persist(add)
            placed_at = process.clock.now().timestamp()
            self.journal(process.name).note("placed", f"s{number}", until=placed_at)


async def _persist(call: Any) -> None:
    while True:
        try:
            await call()
            return
        except StorageError:
            await asyncio.sleep(0.3)
        except InvalidValue:
            # The network was cut until after the end of the schedule.
            return


def failure_of(seed: int) -> str | None:
    """Return what is wrong with that seed, as text; None if nothing is."""
    try:
        verdict = Fleet(seed).run()
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    if verdict.is_good:
        return None
    return f"seed {seed}: " + "; ".join(str(violation) for violation in verdict.violations[:5])


def main(arguments: Sequence[str]) -> int:
    first = int(arguments[0])
    if len(arguments) == 1:
        return _report_one(first)
    began, count = time.monotonic(), int(arguments[1])
    seconds = 0.0
    failed = 0
    with multiprocessing.Pool(int(os.environ.get("PROCESSES", "2"))) as pool:
        for failure in pool.imap_unordered(failure_of, range(first, first + count), chunksize=10):
            if failure is not None:
                failed += 1
                print(failure, flush=True)
    seconds = time.monotonic() - began
    print(f"{count} seeds from {first}: {failed} failed, {seconds:.0f} s")
    return int(failed > 0)


def _report_one(seed: int) -> int:
    fleet = Fleet(seed)
    verdict = fleet.run()
    print(f"seed {seed}: {fleet.conditions}")
    print(f"{fleet.simulation.seconds:.0f} virtual s, trace {fleet.simulation.network.trace[:16]}")
    print("\n".join(verdict.lines()))
    for event in verdict.counter_example:
        print("  ", msgspec.json.encode(event).decode())
    return int(not verdict.is_good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
