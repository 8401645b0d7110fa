"""A fleet of processes in one thread, on virtual time, from one seed: hours of it in a second.

    async def work(machine):                       # the code of one process
        async with AsyncWorkerPool(machine.storage, concurrency=4):
            await asyncio.Event().wait()

    async def scenario(simulation):                # starts processes and injects faults
        worker = simulation.start("worker-1", work)
        ...
        worker.pause(40)                           # longer than its lease
        simulation.start("worker-2", work)
        await asyncio.sleep(3600)

    Simulation(seed=7, faults=Faults(lost_reply=0.02)).run(scenario)

Every machine has its own clock and storage object; all share one store and one event loop. A call to
the store may be slow, fail before it arrives, or be done and lose its reply. It is done even if its
sender was killed after sending it. The order of execution depends on the seed alone, so a seed that
fails once fails always. Task functions must be async: threads and processes run on real time.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar
from unittest import mock

import msgspec

from omniq.errors import StorageError
from omniq.settings import Settings
from omniq.storage.memory import MemoryStorage
from omniq.storage.types import Capabilities
from omniq.storage.wakeups import LocalWakeups
from omniq.testing.faults import FaultyStorage, Verb
from omniq.testing.virtual_time import Machine, VirtualLoop, current_machine
from omniq.worker import pool_parts
from omniq.worker.heartbeat import Heartbeat

T = TypeVar("T")

Reply = Literal["ok", "refused", "lost", "raised"]
CallObserver = Callable[[str, Sequence[Verb], Any, Reply], None]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How the network treats calls to the store. Numbers are probabilities from 0 to 1, or seconds.

    `refused`: the call does not arrive. `lost_reply`: it is done, and its sender gets an error.
    `slow`: it takes up to `slow_seconds` instead of milliseconds. The sender gets an error
    immediately or after `patience`. Without `wakeups`, a machine finds tasks that another machine
    enqueued only by polling. Each machine's wall clock is wrong by up to `skew` seconds.
    """

    refused: float = 0.0
    lost_reply: float = 0.0
    slow: float = 0.0
    slow_seconds: float = 1.0
    patience: float = 5.0
    wakeups: bool = True
    skew: float = 0.0


class Process(Machine):
    """A machine with a storage object."""

    storage: FaultyStorage


class Network:
    """Carries calls from the machines to the store. Can be cut for all machines, or for one."""

    def __init__(self, loop: VirtualLoop, faults: Faults, draw: random.Random) -> None:
        self._loop = loop
        self._draw = draw
        self._cut: dict[str, float] = {}
        self._slowed: dict[str, tuple[float, float]] = {}
        self._trace = hashlib.sha256()
        self.faults = faults
        self.is_over = False
        self.calls = 0
        self.observers: list[CallObserver] = []

    def cut(self, seconds: float, machine: Machine | None = None) -> None:
        """Refuse the calls of all machines, or of one, for this time."""
        name = "" if machine is None else machine.name
        self._cut[name] = max(self._cut.get(name, 0.0), self._loop.time() + seconds)

    def slow(self, seconds: float, machine: Machine, latency: float) -> None:
        """For `seconds`, every call of that machine takes about `latency` in each direction."""
        self._slowed[machine.name] = (self._loop.time() + seconds, latency)

    @property
    def trace(self) -> str:
        """A hash of all calls, their times and their replies: equal for equal runs."""
        return self._trace.hexdigest()

    async def call(
        self, machine: Machine, verbs: Sequence[Verb], step: Callable[[], Awaitable[T]]
    ) -> T:
        """Run `step` on the store and return its result, or raise an error of the network."""
        if self.is_over:
            raise StorageError("the simulation is over")
        self.calls += 1
        reply: asyncio.Future[T] = self._loop.create_future()
        kind = self._draw_reply(machine)
        there, back = self._latency(machine), self._latency(machine)
        if kind != "ok":
            back += self._draw.choice((0.0, self.faults.patience))

        def deliver(value: Any, error: Exception | None) -> None:
            if reply.done():
                return
            if kind != "ok":
                reply.set_exception(StorageError(f"{'/'.join(verbs)}: {kind}, in a simulation"))
            elif error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(value)

        def arrive() -> None:
            value, error = (None, None) if kind == "refused" else _run_now(step)
            self._log_call(machine, verbs, value, "raised" if error else kind)
            self._loop.call_later(back, deliver, value, error)

        # A call that was sent arrives, even if its sender was killed.
        self._loop.call_later(there, arrive, context=self._loop.world_context)
        return await reply

    def _draw_reply(self, machine: Machine) -> Reply:
        now = self._loop.time()
        is_cut = any(self._cut.get(name, 0.0) > now for name in ("", machine.name))
        if is_cut or self._draw.random() < self.faults.refused:
            return "refused"
        return "lost" if self._draw.random() < self.faults.lost_reply else "ok"

    def _latency(self, machine: Machine) -> float:
        faults, draw = self.faults, self._draw
        until, latency = self._slowed.get(machine.name, (0.0, 0.0))
        if until > self._loop.time():
            return latency * draw.uniform(0.5, 1.5)
        if faults.slow and draw.random() < faults.slow:
            return draw.uniform(0, faults.slow_seconds)
        return draw.uniform(0.0001, 0.003)

    def _log_call(self, machine: Machine, verbs: Sequence[Verb], value: Any, kind: Reply) -> None:
        line = f"{self._loop.time():.6f} {machine.name} {' '.join(verbs)} {kind}\n"
        self._trace.update(line.encode())
        for observer in self.observers:
            observer(machine.name, verbs, value, kind)


def _run_now(step: Callable[[], Awaitable[T]]) -> tuple[T | None, Exception | None]:
    """Run the coroutine to its end without a loop: the memory store never waits."""
    steps = step().__await__()
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value, None
    except Exception as error:
        return None, error
    raise AssertionError("a call to the memory store had to wait")


class SimulatedStorage(FaultyStorage):
    """The storage object of one machine. Faults can be planned too, as on `FaultyStorage`."""

    def __init__(self, inner: MemoryStorage, machine: Machine, network: Network) -> None:
        super().__init__(inner)
        self._clock = machine.clock
        self._machine = machine
        self._network = network

    @property
    def capabilities(self) -> Capabilities:
        # All machines share the store, so workers must treat it like a server.
        return msgspec.structs.replace(self._inner.capabilities, reach="fleet")

    def sibling(self) -> SimulatedStorage:
        assert isinstance(self._inner, MemoryStorage)
        sibling = SimulatedStorage(self._inner.sibling(), self._machine, self._network)
        sibling._identity = self._identity
        sibling._is_sibling = True
        sibling._plan = self._plan
        return sibling

    async def _do(self, verbs: Sequence[Verb], step: Callable[[], Awaitable[T]]) -> T:
        return await super()._do(verbs, lambda: self._network.call(self._machine, verbs, step))

    async def _close_inner(self) -> None:
        # Its claims were released earlier over the network, or not at all.
        self._inner._is_open = False


class Simulation:
    """A store, a network, and the machines that are started on it."""

    def __init__(
        self, seed: int, *, faults: Faults | None = None, settings: Settings | None = None
    ) -> None:
        self.seed = seed
        self.random = random.Random(f"scenario {seed}")
        self.loop = VirtualLoop(seed)
        self.network = Network(self.loop, faults or Faults(), random.Random(f"network {seed}"))
        self.machines: dict[str, Process] = {}
        self._store_clock = self.loop.add_machine("store", Machine).clock
        self.store = MemoryStorage(clock=self._store_clock, settings=settings)
        """The store itself, which a scenario may read without the network."""

    @property
    def seconds(self) -> float:
        """Seconds since the simulation began."""
        return self.loop.time()

    def start(self, name: str, main: Callable[[Process], Coroutine[Any, Any, None]]) -> Process:
        """Start a machine that runs `main`. A name may be reused after its machine has ended."""
        machine = self.machines[name] = self.loop.add_machine(name, Process)
        skew = self.network.faults.skew
        machine.clock.skew = timedelta(seconds=round(self.random.uniform(-skew, skew), 6))
        machine.storage = self._connect(machine)
        self.loop.start(machine, main(machine))
        return machine

    def run(self, scenario: Callable[[Simulation], Coroutine[Any, Any, T]]) -> T:
        """Run the scenario to its end, then stop every machine. Can be called once."""
        with mock.patch.object(pool_parts, "Heartbeat", HeartOnTheLoop):
            return self.loop.run_in_world(self._run_scenario(scenario))

    async def _run_scenario(self, scenario: Callable[[Simulation], Coroutine[Any, Any, T]]) -> T:
        await self.store.open()
        try:
            return await scenario(self)
        finally:
            self.network.is_over = True

    def _connect(self, machine: Machine) -> SimulatedStorage:
        inner = self.store.another()
        if not self.network.faults.wakeups:
            inner._local_wakeups = LocalWakeups()
        return SimulatedStorage(inner, machine, self.network)


class HeartOnTheLoop(Heartbeat):
    """Where time is virtual there is one thread, and the heart beats on its loop."""

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            super().start()
            return
        self._loop = loop
        self._stopping = loop.create_future()
        self._ended = loop.create_task(self._live(), name="omniq-heartbeat")


__all__ = [
    "Faults",
    "Network",
    "Process",
    "SimulatedStorage",
    "Simulation",
    "current_machine",
]
