"""`python -m chaos.flow_kills`: SIGKILLs of workers and producers that run flows, and what became of each flow.

python -m chaos.flow_kills --kills 2000                     on every store with a server or files
python -m chaos.flow_kills --backend sqlite --kills 500 --seed 7

Workers are forked by a process that has all imports. Only a kill that hits while a call of the store or a task is
under way is counted. After the kills, every flow that was acknowledged must have ended, with the right value and
exactly the right records, and no callback may have run again after its end was recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from chaos import flow_tasks, processes
from chaos.flow_tasks import CANCELLED, Expected, UnderWay, make_flow
from chaos.history import Event, Journal, read_history
from chaos.processes import Fork, ProcessFactory
from chaos.stores import BACKENDS, DEFAULT_BACKENDS, Store, open_store
from chaos.timeline import TERMINAL, TaskTimeline, Timeline
from chaos.verdict import Violation
from omniq.errors import StorageError
from omniq.storage.base import BaseStorage

_VICTIMS = 2
_LIVE_FLOWS = 12
_LONGEST_LIFE, _START_SECONDS = 0.15, 20.0
_PRODUCER_SHARE = 25
"""One of so many kills hits the producer."""
_DRAIN_SECONDS = 180.0
_CALLS = (
    *("record_and_reserve", "enqueue_many", "save_checkpoint", "give_back_abandoned"),
    *("advance_flows", "results_of", "values_of", "close_group", "complete", "cancel"),
)


def main() -> int:
    options = _parse()
    is_good = True
    for backend in options.backend or DEFAULT_BACKENDS:
        folder = Path(tempfile.mkdtemp(prefix=f"omniq-flow-kills-{backend}-"))
        with open_store(backend, folder) as store:
            run = Run(store, folder, options)
            violations = run.execute()
        for line in run.lines(violations):
            print(line, flush=True)
        is_good = is_good and not violations
        if violations:
            print(f"  its history is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return int(not is_good)


class Run:
    """One store, and the kills of one seed."""

    def __init__(self, store: Store, folder: Path, options: argparse.Namespace) -> None:
        self._store, self._folder, self._kills = store, folder, options.kills
        self._pause, self._seed = options.pause, options.seed
        self._draw = random.Random(options.seed)
        self._factory = ProcessFactory(store, folder, options.seed)
        self.hits: dict[str, int] = {"worker": 0, "producer": 0}
        self.misses = 0
        self.flows = self.callbacks = self.repeated = 0

    def execute(self) -> list[Violation]:
        self._await("setup", processes.create_store, 30)
        self._kill_all()
        workers = [self._start("worker", _work)[0] for _ in range(_VICTIMS)]
        try:
            self._await("sender", _send_events, _DRAIN_SECONDS)
            self._await("reader", _read, _DRAIN_SECONDS)
        finally:
            for fork in workers:
                fork.signal(signal.SIGKILL)
                fork.wait(10)
        events = read_history([self._folder / "events"])
        return list(self._check(Timeline(events), events))

    def _start(self, kind: str, main: Callable[..., Any]) -> tuple[Fork, UnderWay]:
        doing = UnderWay()
        return self._factory.fork(kind, functools.partial(main, doing=doing)), doing

    def _await(self, kind: str, main: Callable[..., Any], seconds: float) -> None:
        fork = self._factory.fork(kind, main)
        if not fork.wait(seconds) or fork.status:
            fork.signal(signal.SIGKILL)
            raise SystemExit(f"{kind} failed; its log is in {self._folder}")

    def _kill_all(self) -> None:
        producer = self._start("producer", _produce)
        alive = [self._start("worker", _work) for _ in range(_VICTIMS)]
        while sum(self.hits.values()) < self._kills:
            if self._draw.randrange(_PRODUCER_SHARE) == 0:
                self._kill("producer", *producer)
                producer = self._start("producer", _produce)
            else:
                self._kill("worker", *alive.pop(0))
                alive.append(self._start("worker", _work))
            time.sleep(self._pause)
        for fork, _ in (producer, *alive):
            fork.signal(signal.SIGKILL)
            fork.wait(10)

    def _kill(self, kind: str, fork: Fork, doing: UnderWay) -> None:
        """Kill the process at a random instant after its first call, as often as needed while it does something."""
        deadline = time.monotonic() + _START_SECONDS
        while not doing.has_any and not fork.has_ended and time.monotonic() < deadline:
            time.sleep(0.004)
        time.sleep(self._draw.uniform(0, _LONGEST_LIFE))
        fork.signal(signal.SIGKILL)
        fork.wait(10)
        # Noted when it is dead: until then it may begin another task.
        self._factory.journal.note("kill", value=fork.name)
        if doing.has_any:
            self.hits[kind] += 1
        else:
            self.misses += 1

    # What became of the flows

    def _check(self, timeline: Timeline, events: list[Event]) -> Iterator[Violation]:
        expected: dict[str, Expected] = {}
        acknowledged: set[str] = set()
        begun: dict[str, list[Event]] = {}
        for event in events:
            match event.what:
                case "flow.try":
                    expected[event.id] = msgspec.convert(event.value, Expected)
                case "flow.ok":
                    acknowledged.add(event.id)
                case "start":
                    begun.setdefault(event.id, []).append(event)
                case _:
                    pass
        records: dict[str, dict[str, TaskTimeline]] = {flow_id: {} for flow_id in expected}
        for task in timeline:
            root, _, name = task.id.partition(".")
            if root in records:
                records[root][name] = task
        for flow_id, wanted in expected.items():
            found = {name: task for name, task in records[flow_id].items() if task.final}
            if "" in found:
                self.flows += 1
                yield from self._check_flow(flow_id, wanted, found)
                for task in found.values():
                    yield from self._check_runs(timeline, task, begun.get(task.id, []))
            elif flow_id in acknowledged:
                yield Violation("LOST", flow_id, "was acknowledged, and is absent")
            elif found:
                yield Violation("PART", flow_id, f"only a part is stored: {sorted(found)}")

    def _check_flow(
        self, flow_id: str, wanted: Expected, found: dict[str, TaskTimeline]
    ) -> Iterator[Violation]:
        statuses = {name: task.final.status for name, task in found.items() if task.final}
        if statuses.pop("") is not wanted.status or statuses != wanted.nodes:
            yield Violation("LOST", flow_id, f"ended as {statuses}, and not as {wanted.nodes}")
            return
        final = found["callback"].final
        if final is not None and final.result != wanted.value:
            yield Violation("VALUE", flow_id, f"{final.result!r}, and not {wanted.value!r}")
        first = min((event.at for event in found["callback"].starts.values()), default=0.0)
        for source in wanted.sources:
            task = found[source]
            if first and task.end_of(task.final_token) > first:
                yield Violation("EARLY", f"{flow_id}.callback", f"began before {source} had ended")
        self.callbacks += wanted.nodes["callback"] is not CANCELLED

    def _check_runs(
        self, timeline: Timeline, task: TaskTimeline, begun: list[Event]
    ) -> Iterator[Violation]:
        tokens = [event.token for event in begun]
        if len(set(tokens)) != len(tokens):
            yield Violation("DOUBLED", task.id, f"two runs of one claim: {tokens}")
        ended = {
            token
            for token, events in task.outcomes.items()
            if any(event.what in TERMINAL for event in events)
        }
        if ended and (len(ended) > 1 or max(tokens, default=0) > min(ended)):
            yield Violation("DOUBLED", task.id, f"ended by claims {sorted(ended)}, began {tokens}")
        if tokens and max(tokens) > task.final_token:
            yield Violation("DOUBLED", task.id, f"began {tokens}, recorded {task.final_token}")
        if not task.id.endswith(".callback"):
            return
        for one, after in itertools.pairwise(begun):
            self.repeated += 1
            was_killed = timeline.killed_between(one.by, one.at, after.at) is not None
            if not (was_killed or task.stale or one.token in task.outcomes):
                yield Violation("DOUBLED", task.id, f"ran again, but {one.by} was not killed")

    def lines(self, violations: list[Violation]) -> list[str]:
        hits = sum(self.hits.values())
        codes = [violation.code for violation in violations]
        return [
            f"{self._store.backend}, seed {self._seed}: {hits} kills under way "
            f"(producer {self.hits['producer']}; {self.misses} others not counted), "
            f"{self.flows} flows, {self.callbacks} callbacks: lost {codes.count('LOST')}, "
            f"doubled {codes.count('DOUBLED')}, other {len(codes) - codes.count('LOST') - codes.count('DOUBLED')}; "
            f"{self.repeated} callbacks whose worker was killed ran again",
            *(f"  {violation}" for violation in violations[:20]),
        ]


# Processes


def _observe(storage: BaseStorage, doing: UnderWay) -> None:
    """Count the calls of the store that are under way."""
    for name in _CALLS:
        setattr(storage, name, _counted(getattr(storage, name), doing))


def _counted(call: Callable[..., Any], doing: UnderWay) -> Callable[..., Any]:
    async def counted(*args: Any, **kwargs: Any) -> Any:
        with doing.call():
            return await call(*args, **kwargs)

    return counted


async def _work(store: Store, journal: Journal, draw: random.Random, *, doing: UnderWay) -> None:
    flow_tasks.under_way = doing
    await processes.worker(store, journal, draw, watch=lambda storage: _observe(storage, doing))


async def _produce(store: Store, journal: Journal, draw: random.Random, *, doing: UnderWay) -> None:
    queue = processes.open_queue(store)
    await processes.persist(queue.open)
    _observe(queue.storage, doing)
    live: list[Any] = []
    number = 0
    while True:
        with contextlib.suppress(StorageError):
            live = [handle for handle in live if not (await handle.status()).is_final]
            if len(live) < _LIVE_FLOWS:
                flow, expected = make_flow(draw)
                number += 1
                flow_id = f"{journal.by}-{number:05}"
                journal.note("flow.try", flow_id, value=msgspec.to_builtins(expected))
                handle = await queue.start(flow, flow_id=flow_id)
                journal.note("flow.ok", flow_id)
                live.append(handle)
                if expected.event and draw.random() < 0.8:
                    await queue.send_event("go", 7, to=f"{flow_id}.{expected.event}")
                continue
        await asyncio.sleep(0.05)


async def _send_events(store: Store, _: Journal, __: random.Random) -> None:
    """Send the events that no producer has sent, until every record has ended."""
    queue = processes.open_queue(store)
    await processes.persist(queue.open)
    while True:
        after, is_waiting = "", False
        while page := await queue.storage.list_tasks(after=after, limit=500):
            for task in page:
                is_waiting = is_waiting or not task.status.is_final
                if task.id.endswith(".ask") and not task.status.is_final:
                    await queue.send_event("go", 7, to=task.id)
            after = page[-1].id
        if not is_waiting:
            break
        await asyncio.sleep(0.2)
    await queue.close()


async def _read(store: Store, journal: Journal, draw: random.Random) -> None:
    await processes.reader(store, journal, draw)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos.flow_kills", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all but s3")
    parser.add_argument("--kills", type=int, default=2_000, help="on each store")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
