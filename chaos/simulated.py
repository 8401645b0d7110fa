"""A fleet on virtual time that is treated badly, all of it drawn from one seed.

python -m chaos.simulated 7            # one seed, told in full
python -m chaos.simulated 0 5000       # many, told when they fail
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
from chaos.producing import Producer
from chaos.reading import read_store
from chaos.verdict import Verdict
from chaos.watching import watch_lease, watch_pool
from chaos.work import Plan, tick
from omniq.errors import InvalidValue, OmniqError, StorageError
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.settings import Settings
from omniq.testing.faults import Verb
from omniq.testing.simulation import Faults, Process, Reply, Simulation
from omniq.worker import AsyncWorkerPool

LONGEST_DRAIN = 900.0


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What a seed has in store for its fleet: how large it is, and how it is treated."""

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
    fades: int
    schedules: int

    @classmethod
    def drawn(cls, draw: random.Random) -> Weather:
        """Some seeds are calm and some are storms; what is rare alone is found together."""

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
            fades=some(3, 0.3),
            schedules=some(2, 0.4),
        )


class Fleet:
    """Producers, workers and their troubles, from one seed, and everything they wrote down."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"fleet {seed}")
        self.weather = Weather.drawn(self.draw)
        settings = Settings(result_ttl=1e6, max_crashes=self.weather.max_crashes)
        self.simulation = Simulation(seed, faults=self.weather.faults, settings=settings)
        self.events: list[Event] = []
        self._is_over = False
        self._born = 0
        self._asked_to_stop: dict[str, asyncio.Future[float | None]] = {}
        self.simulation.network.observers.append(self._watch_store)

    def play(self) -> Verdict:
        """From the first enqueue to the last outcome; what the checker makes of it."""
        try:
            self.simulation.run(lambda _: self._story())
        finally:
            self._is_over = True
        promises = Promises(
            max_crashes=self.weather.max_crashes,
            drain=LONGEST_DRAIN,
            skew=self.weather.faults.skew * 2 + 1e-6,
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
            for row in value[1]:
                self._note(
                    Event(self.simulation.seconds, by, "store.claim", row.id, row.token, row.owner)
                )

    # What happens

    async def _story(self) -> None:
        weather = self.weather
        for _ in range(weather.workers):
            self._start_worker()
        self.simulation.start("producer", self._produce)
        if weather.schedules:
            self.simulation.start("planner", self._plan_schedules)
        await self._trouble()
        await self._calm_down()
        await read_store(self.simulation.store, self.journal("reader"))

    async def _trouble(self) -> None:
        """Everything that the weather brings, at instants of its own."""
        weather, draw = self.weather, self.draw
        troubles = [
            *[self._kill] * weather.kills,
            *[self._pause] * weather.pauses,
            *[self._terminate] * weather.stops,
            *[self._cut] * weather.cuts,
            *[self._advance_time] * weather.jumps,
            *[self._fade] * weather.fades,
        ]
        draw.shuffle(troubles)
        instants = sorted(draw.uniform(0, weather.seconds) for _ in troubles)
        for at, strike in zip(instants, troubles, strict=True):
            await asyncio.sleep(at - self.simulation.seconds)
            strike()
        await asyncio.sleep(weather.seconds - self.simulation.seconds)

    async def _calm_down(self) -> None:
        """No more faults, and somebody to do the work."""
        network = self.simulation.network
        network.faults = Faults(wakeups=self.weather.faults.wakeups)
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

    # Troubles

    def _workers(self) -> list[Process]:
        machines = self.simulation.machines.values()
        return [machine for machine in machines if machine.name.startswith("worker")]

    def _victim(self) -> Process | None:
        alive = [
            process
            for process in self._workers()
            if process.is_running and not self._asked_to_stop[process.name].done()
        ]
        return self.draw.choice(alive) if alive else None

    def _strike(self, what: str, victim: Process, seconds: float = 0.0) -> None:
        self.journal("nemesis").note(what, value=victim.name, until=seconds)

    def _kill(self) -> None:
        if (victim := self._victim()) is not None:
            self._strike("kill", victim)
            victim.kill()
            self._start_worker(self.draw.uniform(0, self.weather.lease * 2))

    def _pause(self) -> None:
        if (victim := self._victim()) is not None:
            seconds = self.draw.choice((0.1, 0.5, 1.0, 1.5, 3.0)) * self.weather.lease
            self._strike("stop", victim, seconds)
            victim.pause(seconds)

    def _terminate(self) -> None:
        if (victim := self._victim()) is not None:
            self._strike("term", victim)
            self._asked_to_stop[victim.name].set_result(self.draw.choice((None, 0.5, 5.0)))
            self._start_worker(self.draw.uniform(0, self.weather.lease))

    def _cut(self) -> None:
        seconds = self.draw.choice((0.2, 0.6, 1.5)) * self.weather.lease
        victim = self._victim() if self.draw.random() < 0.5 else None
        self.simulation.network.cut(seconds, victim)
        self.journal("nemesis").note("cut", value=victim and victim.name, until=seconds)

    def _fade(self) -> None:
        """A worker's calls take long, and then arrive no more: its lease ends under its hands."""
        if (victim := self._victim()) is not None:
            lease, network = self.weather.lease, self.simulation.network
            seconds = self.draw.uniform(0.5, 2) * lease
            network.slow(seconds, victim, lease * self.draw.uniform(0.05, 0.2))
            cut = partial(network.cut, 2 * lease, victim)
            self.simulation.loop.call_later(
                seconds, cut, context=self.simulation.loop.world_context
            )
            self._strike("cut", victim, seconds + 2 * lease)

    def _advance_time(self) -> None:
        if (victim := self._victim()) is not None:
            skew = self.weather.faults.skew or 1.0
            victim.clock.skew = timedelta(seconds=round(self.draw.uniform(-skew, skew), 6))

    # Processes

    def _start_worker(self, after: float = 0.0) -> None:
        self._born += 1
        name = f"worker-{self._born}"

        async def work_for_ever(process: Process) -> None:
            await asyncio.sleep(after)
            await self._work(process)

        self._asked_to_stop[name] = self.simulation.loop.create_future()
        self.simulation.start(name, work_for_ever)

    async def _work(self, process: Process) -> None:
        journal = self.journal(process.name)
        current.set(journal)
        watch_lease(process.storage, journal)
        weather, stop = self.weather, self._asked_to_stop[process.name]
        while True:
            pool = AsyncWorkerPool(
                process.storage,
                weather.concurrency,
                weather.poll,
                0.2,
                lease=weather.lease,
                loop_patience=4.0,
            )
            watch_pool(pool, journal)
            try:
                await pool.start()
                timeout = await stop
                await pool.stop(timeout, cancel_in_flight=timeout is None)
                return
            except OmniqError:
                # As a supervisor would: once more, a little later.
                if stop.done():
                    return
                await asyncio.sleep(0.5)

    async def _produce(self, process: Process) -> None:
        draw = random.Random(f"plans {self.simulation.seed}")
        producer = Producer(process.storage, self.journal(process.name), draw)
        await _persist(process.storage.open)
        for number in range(self.weather.tasks):
            await asyncio.sleep(draw.uniform(0, 2) * self.weather.seconds / self.weather.tasks)
            await producer.enqueue(f"t{number:03}", self._plan(draw, number))
            if draw.random() < 0.1:
                await producer.cancel()
            if draw.random() < 0.1:
                await producer.revive()

    def _plan(self, draw: random.Random, number: int) -> Plan:
        lease = self.weather.lease
        kind = draw.randrange(12)
        return Plan(
            seconds=draw.choice((0.0, 0.01, 0.3, 1.0, lease, lease * 2.5)),
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
        # A clock that is wrong plans for times that are: not what is asked here.
        process.clock.skew = timedelta()
        await _persist(process.storage.open)
        queue = AsyncTaskQueue(process.storage)
        for number in range(self.weather.schedules):
            every = self.draw.choice((3, 7, 11))
            start = process.clock.now() + timedelta(seconds=30)
            add = partial(
                queue.schedules.add,
                f"s{number}",
                tick,
                interval=timedelta(seconds=every),
                start=start,
                end=start + timedelta(seconds=self.weather.seconds),
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
            # The network was away for so long that the schedule is over.
            return


def failing(seed: int) -> str | None:
    """What is wrong with that seed, in words; None when nothing is."""
    try:
        verdict = Fleet(seed).play()
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    if verdict.is_good:
        return None
    return f"seed {seed}: " + "; ".join(str(violation) for violation in verdict.violations[:5])


def main(arguments: Sequence[str]) -> int:
    first = int(arguments[0])
    if len(arguments) == 1:
        return _tell_one(first)
    began, count = time.monotonic(), int(arguments[1])
    seconds = 0.0
    failed = 0
    with multiprocessing.Pool(int(os.environ.get("PROCESSES", "2"))) as pool:
        for trouble in pool.imap_unordered(failing, range(first, first + count), chunksize=10):
            if trouble is not None:
                failed += 1
                print(trouble, flush=True)
    seconds = time.monotonic() - began
    print(f"{count} seeds from {first}: {failed} failed, {seconds:.0f} s")
    return int(failed > 0)


def _tell_one(seed: int) -> int:
    fleet = Fleet(seed)
    verdict = fleet.play()
    print(f"seed {seed}: {fleet.weather}")
    print(f"{fleet.simulation.seconds:.0f} virtual s, trace {fleet.simulation.network.trace[:16]}")
    print("\n".join(verdict.lines()))
    for event in verdict.counter_example:
        print("  ", msgspec.json.encode(event).decode())
    return int(not verdict.is_good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
