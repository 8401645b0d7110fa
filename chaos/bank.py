"""A bank in the database of its tasks: money moves in `ctx.transaction()` while workers, servers and data fail.

    python -m chaos.bank --backend sqlite --kills 300 --seed 7
    python -m chaos.bank --backend sqlite --backend postgres --runs 20 --record bank.jsonl

Beside the database, where no restore reaches it, a ledger has every run by its token, and a register that
accepts a write only under a higher token than the last one. At the end the money is all there, each transfer that
succeeded is in the outbox once, no token was given twice, and nothing that was acknowledged is missing, except
what was enqueued after the copy that was restored. Redis has no such transactions: its tasks move no money,
and all else must hold.

The seed of each run is one higher than that of the run before it. `--record` appends what each run did and what
was wrong to a file, and the sums are those of all runs in that file, so that many short commands add up.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from chaos.bank_places import PLACES, Place
from chaos.history import Journal
from chaos.processes import LEASE, MANY_CRASHES, POLL, Fork, ProcessFactory
from chaos.store_reader import all_tasks
from chaos.stores import Store
from omniq import AsyncTaskQueue, TaskContext, TaskStatus, task
from omniq.errors import OmniqError
from omniq.settings import Settings

ACCOUNTS, BALANCE = 100, 1_000
BATCH = 12
"""Transfers that are enqueued at a time."""
WIDTH = 3
"""Tasks that a worker runs at a time."""

_TABLES = """
CREATE TABLE accounts (id integer PRIMARY KEY, balance integer NOT NULL);
CREATE TABLE outbox (task text, token bigint, source integer, target integer, amount integer);
"""
_LEDGER = """
PRAGMA journal_mode = WAL;
CREATE TABLE runs (task text, token integer, PRIMARY KEY (task, token));
CREATE TABLE twice (task text, token integer);
CREATE TABLE register (task text PRIMARY KEY, token integer);
"""
_NOTE = "INSERT INTO register VALUES (?, ?) ON CONFLICT (task) DO UPDATE SET token = excluded.token WHERE token < excluded.token"
_LONGEST_LIFE = 0.6
_DRAIN_SECONDS = 120.0
_HOLD_SECONDS = 2.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How many faults of each kind to inject."""

    kills: int = 100
    stops: int = 4
    restarts: int = 3
    restores: int = 2


def create_ledger(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_LEDGER)


def note_run(ledger: str, task_id: str, token: int) -> None:
    """Note the run, and write the token to the register if it is higher than the last one."""
    with closing(sqlite3.connect(ledger, timeout=60, isolation_level=None)) as db:
        try:
            db.execute("INSERT INTO runs VALUES (?, ?)", (task_id, token))
        except sqlite3.IntegrityError:
            db.execute("INSERT INTO twice VALUES (?, ?)", (task_id, token))
        db.execute(_NOTE, (task_id, token))


@task(max_retries=1_000_000)
async def transfer(ctx: TaskContext, ledger: str, source: int, target: int, amount: int) -> None:
    note_run(ledger, ctx.task_id, ctx.fencing_token)
    async with ctx.transaction() as connection:
        for statement in (
            # In the order of the accounts, so that two transfers do not wait for each other.
            *sorted(
                f"UPDATE accounts SET balance = balance {change:+} WHERE id = {account:03}"
                for account, change in ((source, -amount), (target, amount))
            ),
            f"INSERT INTO outbox VALUES ('{ctx.task_id}', {ctx.fencing_token}, {source}, {target}, {amount})",
        ):
            done = connection.execute(statement)
            if not isinstance(done, sqlite3.Cursor):
                await done
        ctx.result = ctx.fencing_token


@task(max_retries=1_000_000)
async def note(ctx: TaskContext, ledger: str, seconds: float = 0.0) -> int:
    note_run(ledger, ctx.task_id, ctx.fencing_token)
    await asyncio.sleep(seconds)
    return ctx.fencing_token


def _queue(store: Store) -> AsyncTaskQueue:
    settings = Settings(max_crashes=MANY_CRASHES, result_ttl=86_400)
    return AsyncTaskQueue(store.url, settings=settings)


# Processes


async def set_up(store: Store, journal: Journal, _: random.Random, *, place: Place) -> None:
    async with _queue(store):
        if not store.has_transactions:
            return
        rows = ", ".join(f"({number}, {BALANCE})" for number in range(ACCOUNTS))
        for statement in (*_TABLES.split(";")[:-1], f"INSERT INTO accounts VALUES {rows}"):
            await place.ask(statement)


async def work(store: Store, journal: Journal, _: random.Random) -> None:
    """Work until the process is killed, starting again after errors as a supervisor would."""
    while True:
        try:
            async with _queue(store) as queue:
                pool = queue.worker(
                    concurrency=WIDTH, poll_interval=POLL, base_retry_delay=0.02, lease=LEASE
                )
                async with pool:
                    await pool.wait()
        except OmniqError:
            await asyncio.sleep(0.05)


async def enqueue(
    store: Store, journal: Journal, draw: random.Random, *, ledger: str, acknowledged: Path
) -> None:
    """Enqueue a batch of transfers, and note those that were acknowledged."""
    accounts = range(ACCOUNTS)
    calls: list[Any] = [
        (transfer, (ledger, *draw.sample(accounts, 2), draw.randint(1, 50)), {})
        if store.has_transactions
        else (note, (ledger,), {})
        for _ in range(BATCH)
    ]
    async with _queue(store) as queue:
        handles = await queue.enqueue_many(calls)
    with acknowledged.open("a") as file:
        file.write("".join(f"{handle.id}\n" for handle in handles))


async def drain(store: Store, journal: Journal, _: random.Random) -> None:
    """Return when every task has succeeded."""
    async with asyncio.timeout(_DRAIN_SECONDS), _queue(store) as queue:
        while True:
            counts = (await queue.stats()).by_status
            if counts[TaskStatus.SUCCESS] == sum(counts.values()):
                return
            await asyncio.sleep(0.2)


async def hold(
    store: Store, journal: Journal, _: random.Random, *, ledger: str, count: int
) -> None:
    """Return when the workers run nothing but tasks that were enqueued now."""
    async with asyncio.timeout(_DRAIN_SECONDS), _queue(store) as queue:
        calls: list[Any] = [(note, (ledger, _HOLD_SECONDS), {})] * count
        ids = {handle.id for handle in await queue.options(priority=9).enqueue_many(calls)}
        while True:
            with closing(sqlite3.connect(ledger, timeout=60)) as db:
                begun = {task_id for (task_id,) in db.execute("SELECT task FROM runs")}
            if ids <= begun:
                return
            await asyncio.sleep(0.02)


async def notice(store: Store, journal: Journal, _: random.Random, *, since: float) -> None:
    """Return when a worker has noticed a restore after that time."""
    async with asyncio.timeout(_DRAIN_SECONDS), _queue(store) as queue:
        while True:
            if (await queue.storage.store_record()).raised_at > since * 1_000_000:
                return
            await asyncio.sleep(0.02)


async def audit(
    store: Store, journal: Journal, _: random.Random, *, place: Place, result: Path
) -> None:
    """Store what the bank has, and the tasks that succeeded, with their tokens."""
    succeeded: dict[str, Any] = {}
    async with _queue(store) as queue:
        async for found in all_tasks(queue.storage):
            ended = await queue.get_result(found.id)
            succeeded[found.id] = None if ended is None else ended.result
    accounts = outbox = None
    if store.has_transactions:
        accounts = await place.ask("SELECT id, balance FROM accounts")
        outbox = await place.ask("SELECT task, token, source, target, amount FROM outbox")
    _save(result, [succeeded, accounts, outbox])


def _save(path: Path, found: list[Any]) -> None:
    path.write_bytes(msgspec.json.encode(found))


# The run


class Run:
    """One bank under all kinds of faults."""

    def __init__(self, place: Place, folder: Path, seed: int, plan: Plan) -> None:
        self._draw = random.Random(seed)
        self._factory = ProcessFactory(place.store, folder, seed)
        self._place, self._folder, self._plan = place, folder, plan
        self._ledger = folder / "ledger.db"
        self._acknowledged = folder / "acknowledged"
        self._acknowledged.touch()
        self._forgotten: set[str] = set()
        self._since_copy: int | None = None
        self.done: Counter[str] = Counter()

    def execute(self) -> list[str]:
        """Inject all faults; returns what is wrong at the end."""
        create_ledger(self._ledger)
        self._await("setup", partial(set_up, place=self._place))
        steady = [self._factory.fork("steady", work) for _ in range(2)]
        try:
            for fault in self._faults():
                self._inject(fault, steady)
            self._await("drain", drain)
        finally:
            for fork in steady:
                _end(fork)
        result = self._folder / "audit.json"
        self._await("audit", partial(audit, place=self._place, result=result))
        succeeded, accounts, outbox = msgspec.json.decode(result.read_bytes())
        self.done["transfers"] = len(succeeded)
        acknowledged = set(self._ids()) - self._forgotten
        return [
            *(check_money(accounts, outbox) if accounts else []),
            *check_tasks(succeeded, outbox, acknowledged),
            *check_tokens(succeeded, self._ledger),
        ]

    def _faults(self) -> list[str]:
        plan = self._plan
        restarts = plan.restarts if self._place.can_restart else 0
        restores = plan.restores if self._place.can_restore else 0
        faults = ["kill"] * plan.kills + ["stop"] * plan.stops + ["restart"] * restarts
        self._draw.shuffle(faults)
        # Each copy is restored some faults later.
        for number in range(restores):
            start = len(faults) * number // restores
            first, second = sorted(
                self._draw.sample(range(start, start + plan.kills // restores), 2)
            )
            faults[first:first] = ["copy"]
            faults[second + 1 : second + 1] = ["restore"]
        return faults

    def _inject(self, fault: str, steady: Sequence[Fork]) -> None:
        self.done[self._place.restart_kind if fault == "restart" else fault] += 1
        match fault:
            case "kill":
                if self.done["kill"] % 4 == 1:
                    self._enqueue()
                victim = self._factory.fork("victim", work)
                time.sleep(self._draw.uniform(0.02, _LONGEST_LIFE))
                _end(victim)
            case "stop":
                victim = self._draw.choice(steady)
                victim.signal(signal.SIGSTOP)
                time.sleep(LEASE * 1.5)
                victim.signal(signal.SIGCONT)
            case "restart":
                self._place.restart()
            case "copy":
                self._place.copy()
                self._since_copy = len(self._ids())
            case "restore":
                # A worker notices a restore by what it holds, and must not have room for another task before.
                self._await(
                    "holder", partial(hold, ledger=str(self._ledger), count=WIDTH * len(steady))
                )
                # What was enqueued meanwhile may be in the copy or not.
                self._forgotten.update(self._ids()[self._since_copy :])
                began = time.time()
                self._place.put_back()
                # A worker that starts now could claim before one of the others notices.
                self._await("notice", partial(notice, since=began))

    def _enqueue(self) -> None:
        run = partial(enqueue, ledger=str(self._ledger), acknowledged=self._acknowledged)
        self._await("producer", run)

    def _ids(self) -> list[str]:
        return self._acknowledged.read_text().split()

    def _await(self, kind: str, main: Any) -> None:
        fork = self._factory.fork(kind, main)
        if not fork.wait(_DRAIN_SECONDS + 30) or fork.status:
            _end(fork)
            log = (self._folder / "log").read_text(errors="replace")[-4_000:]
            raise RuntimeError(f"{kind} failed:\n{log}")


# What must hold


def check_money(accounts: Sequence[Any], outbox: Sequence[Sequence[Any]]) -> list[str]:
    """Whether the accounts are what the transfers in the outbox make of them."""
    expected = dict.fromkeys(range(ACCOUNTS), BALANCE)
    for _, _, source, target, amount in outbox:
        expected[source] -= amount
        expected[target] += amount
    if dict(accounts) != expected:
        return ["the accounts are not what the outbox says"]
    return []


def check_tasks(
    succeeded: dict[str, int], outbox: Sequence[Sequence[Any]] | None, acknowledged: set[str]
) -> list[str]:
    """Whether each acknowledged transfer is there, and each that succeeded is in the outbox (if any) once."""
    wrong = []
    if lost := acknowledged - succeeded.keys():
        wrong.append(f"acknowledged, and not there: {sorted(lost)[:5]}")
    if outbox is None:
        return wrong
    sent, ended = Counter((each[0], each[1]) for each in outbox), Counter(succeeded.items())
    if sent != ended:
        differing = (sent - ended) + (ended - sent)
        wrong.append(f"not once in the outbox: {sorted(differing)[:5]}")
    return wrong


def check_tokens(succeeded: dict[str, int], ledger: Path) -> list[str]:
    """Whether no token was given twice, and the run that succeeded was the last to write."""
    wrong = []
    with closing(sqlite3.connect(ledger)) as db:
        twice = db.execute("SELECT task, token FROM twice").fetchall()
        register = dict(db.execute("SELECT task, token FROM register"))
    if twice:
        wrong.append(f"tokens given twice: {twice[:5]}")
    if behind := [each for each, token in succeeded.items() if register.get(each) != token]:
        wrong.append(f"the register has another token than the run that succeeded: {behind[:5]}")
    return wrong


def _end(fork: Fork) -> None:
    fork.signal(signal.SIGKILL)
    fork.wait(10)


def run_once(backend: str, seed: int, plan: Plan) -> dict[str, Any]:
    """Returns what one bank went through, and what was wrong at its end."""
    with tempfile.TemporaryDirectory(prefix="bank-") as name:
        place = PLACES[backend](Path(name))
        try:
            run = Run(place, Path(name), seed, plan)
            wrong = run.execute()
        finally:
            place.close()
    return {"backend": backend, "seed": seed, "done": dict(run.done), "wrong": wrong}


def sums(runs: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each backend and one for all: what their runs went through."""
    lines = []
    for backend in (*dict.fromkeys(run["backend"] for run in runs), "all"):
        chosen = [run for run in runs if backend in (run["backend"], "all")]
        done = sum((Counter(run["done"]) for run in chosen), Counter[str]())
        broken = [run["seed"] for run in chosen if run["wrong"]]
        what = ", ".join(f"{name} {count}" for name, count in sorted(done.items()))
        lines.append(f"{backend}: {len(chosen)} runs, {what}; broken: {broken or 'none'}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.bank", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=PLACES, action="append", help="default: sqlite")
    for name, count in msgspec.structs.asdict(Plan()).items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--runs", type=int, default=1, help="of each backend")
    parser.add_argument("--record", type=Path, help="file to which each run is added")
    options = parser.parse_args()
    plan = Plan(**{name: getattr(options, name) for name in msgspec.structs.asdict(Plan())})
    runs: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.runs):
        for backend in options.backend or ["sqlite"]:
            run = run_once(backend, seed, plan)
            runs.append(run)
            print(f"{backend}, seed {seed}: {run['done']}")
            print("\n".join(run["wrong"]) or "every promise was kept", flush=True)
            if options.record:
                with options.record.open("ab") as file:
                    file.write(msgspec.json.encode(run) + b"\n")
    if options.record:
        runs = [msgspec.json.decode(line) for line in options.record.read_bytes().splitlines()]
    print("\n".join(sums(runs)))
    return int(any(run["wrong"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
