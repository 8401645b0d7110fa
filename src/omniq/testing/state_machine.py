"""A Hypothesis state machine that compares a backend with `MemoryStorage` and with the model.

Several owners share one store and one clock. Each step is one call on the backend under test, on a
`MemoryStorage` and on the model. All three must return the same result, and reads must return the
same afterwards.

    TestMine = state_machine_for(open_my_store).TestCase

where `open_my_store(clock, settings, max_pending)` creates an empty `Store`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from omniq.models import Progress, Runnable, Task, TaskResult, TaskStatus
from omniq.outcomes import Outcome
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.testing.builders import an_output
from omniq.testing.clock import ManualClock
from omniq.testing.model import Model, Owner
from omniq.testing.model_views import model_view
from omniq.testing.state_machine_steps import (
    BACK,
    CHANGED_ETAS,
    CLAIM_TIMES,
    GATE_MIXES,
    MOSTLY_TRUE,
    NEEDS,
    OUTCOMES,
    QUEUE_FILTERS,
    QUEUES,
    RUNNABLES,
    SECONDS,
    SLOT,
    SLOTS,
    TASK_BATCHES,
    Claimed,
    OutcomeSpec,
    Step,
    TaskSpec,
    an_error,
    outcome_of,
    step,
    steps,
    task_of,
    task_specs,
)
from omniq.testing.state_machine_stores import (
    STORE_VIEWS,
    MemoryStore,
    OpenStore,
    StoreUnderTest,
    answer_of,
    brief,
    differences,
)

SETTINGS = Settings(lease=9.0, result_ttl=60.0, max_crashes=2, durability="os")


class StorageStateMachine(RuleBasedStateMachine):
    """Compares the stores of `open_store` with the model. `state_machine_for` makes a subclass."""

    open_store: ClassVar[OpenStore]
    has_failed: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._clock = ManualClock()
        self._stores: list[StoreUnderTest] = []
        self._owners: list[Owner] = []
        self._claims: list[Claimed] = []
        self._calls: list[tuple[str, list[Task]]] = []
        self._claim_ids: list[tuple[int, str]] = []
        self._tokens: dict[str, int] = {}
        self._ids: dict[str, None] = {}
        self._steps = 0
        self._expected: dict[str, Any] = {}

    @initialize(
        max_pending=st.sampled_from((None, None, None, 5, 9)), gates=GATE_MIXES, specs=TASK_BATCHES
    )
    def open(self, max_pending: int | None, gates: tuple[str, ...], specs: list[TaskSpec]) -> None:
        self._model = Model(self._clock, SETTINGS, max_pending)
        self._gates = gates
        make = type(self).open_store
        self._stores = [StoreUnderTest("the backend", make(self._clock, SETTINGS, max_pending))]
        if make is not MemoryStore:
            reference = MemoryStore(self._clock, SETTINGS, max_pending)
            self._stores.append(StoreUnderTest("the reference", reference))
        for slot in range(SLOTS):
            self._owners.append(self._model.open_owner())
            self._open_owner(slot)
        self.enqueue_many(0, specs)
        self._check_views_match()

    def teardown(self) -> None:
        try:
            for tested in self._stores:
                for storage in tested.storages:
                    self._run(storage.close())
                self._run(tested.store.discard())
        finally:
            self._runner.close()

    # One rule for all steps: with one rule each, Hypothesis would leave out half of them in every
    # run, and a run without claims tests little.
    @rule(step=steps())
    def run_step(self, step: Step) -> None:
        name, arguments = step
        if not NEEDS[name] or getattr(self, NEEDS[name]):
            try:
                getattr(self, name)(**arguments)
                self._check_views_match()
            except Exception:
                # If the same steps succeed when they are replayed, Hypothesis says no more than that.
                if not type(self).has_failed:
                    type(self).has_failed = True
                    traceback.print_exc()
                raise

    @step(1)
    def do_nothing(self) -> None:
        """Hypothesis shrinks a step that does not matter to this one."""

    # Enqueue

    @step(3, slot=SLOT, spec=task_specs())
    def enqueue(self, slot: int, spec: TaskSpec) -> None:
        task = self._task(spec)
        self._compare(
            slot,
            lambda storage: storage.enqueue(task),
            lambda: self._model.enqueue_many([task])[0],
        )

    @step(3, slot=SLOT, specs=TASK_BATCHES)
    def enqueue_many(self, slot: int, specs: list[TaskSpec]) -> None:
        tasks = [self._task(spec) for spec in specs]
        nonce = f"nonce-{len(self._calls)}"
        self._calls.append((nonce, tasks))
        self._enqueue_many(slot, nonce, tasks)

    @step(1, needs="_calls", slot=SLOT, back=BACK)
    def repeat_an_enqueue_whose_reply_was_lost(self, slot: int, back: int) -> None:
        nonce, tasks = self._calls[-1 - back % len(self._calls)]
        self._enqueue_many(slot, nonce, tasks)

    def _enqueue_many(self, slot: int, nonce: str, tasks: list[Task]) -> None:
        self._compare(
            slot,
            lambda storage: storage.enqueue_many(tasks, nonce=nonce),
            lambda: self._model.enqueue_many(tasks, nonce),
        )

    # Claim

    @step(
        7,
        slot=SLOT,
        limit=st.integers(1, 6),
        when=CLAIM_TIMES,
        queues=QUEUE_FILTERS,
        runnable=RUNNABLES,
    )
    def reserve(
        self,
        slot: int,
        limit: int,
        when: int | None,
        queues: Sequence[str] | None,
        runnable: Runnable | None = None,
    ) -> None:
        claim_id = f"claim-{self._steps}"
        self._claim_ids.append((slot, claim_id))
        self._reserve(slot, [], limit, when, queues, claim_id, runnable)

    @step(1, needs="_claim_ids", back=st.integers(0, 3))
    def repeat_a_claim_whose_reply_was_lost(self, back: int) -> None:
        slot, claim_id = self._claim_ids[-1 - back % len(self._claim_ids)]
        self._reserve(slot, [], 2, None, None, claim_id)

    @step(2, slot=SLOT, when=SECONDS)
    def dequeue(self, slot: int, when: int) -> None:
        now = self._at(when)
        claimed = self._compare(
            slot,
            lambda storage: storage.dequeue(now),
            lambda: next(
                iter(self._model.record_and_reserve(self._owners[slot], [], 1, now)[1]), None
            ),
        )
        if isinstance(claimed, Task):
            self._remember(slot, [claimed])

    @step(
        6,
        slot=SLOT,
        specs=st.lists(OUTCOMES, max_size=3),
        limit=st.integers(1, 3),
        queues=QUEUE_FILTERS,
        runnable=RUNNABLES,
    )
    def record_and_reserve(
        self,
        slot: int,
        specs: list[OutcomeSpec],
        limit: int,
        queues: Sequence[str] | None,
        runnable: Runnable | None = None,
    ) -> None:
        outcomes = [self._outcome(spec)[1] for spec in specs if self._claims]
        self._reserve(slot, outcomes, limit, None, queues, None, runnable)

    def _reserve(
        self,
        slot: int,
        outcomes: list[Outcome],
        limit: int,
        when: int | None,
        queues: Sequence[str] | None,
        claim_id: str | None,
        runnable: Runnable | None = None,
    ) -> None:
        now = None if when is None else self._at(when)
        answer = self._compare(
            slot,
            lambda storage: storage.record_and_reserve(
                outcomes, limit, now, queues=queues, claim_id=claim_id, runnable=runnable
            ),
            lambda: self._model.record_and_reserve(
                self._owners[slot], outcomes, limit, now, queues, claim_id, runnable
            ),
        )
        if isinstance(answer, tuple):
            self._remember(slot, answer[1])

    def _remember(self, slot: int, tasks: list[Task]) -> None:
        for task in tasks:
            claim = Claimed(slot, task.id, task.token)
            if claim not in self._claims:
                self._claims.append(claim)

    # Record

    @step(
        7,
        needs="_claims",
        specs=st.lists(OUTCOMES, min_size=1, max_size=3),
        by=st.sampled_from((None, None, None, None, *range(SLOTS))),
    )
    def record(self, specs: list[OutcomeSpec], by: int | None) -> None:
        slot, first = self._outcome(specs[0])
        slot = slot if by is None else by
        outcomes = [first, *(self._outcome(spec)[1] for spec in specs[1:])]
        self._compare(
            slot,
            lambda storage: storage.record(outcomes),
            lambda: self._model.record_and_reserve(self._owners[slot], outcomes, 0)[0],
        )

    @step(3, needs="_claims", back=BACK, is_current=MOSTLY_TRUE)
    def mark_done(self, back: int, is_current: bool) -> None:
        claim = self._pick(back, is_current)
        result = TaskResult(task_id=claim.task_id, status=TaskStatus.SUCCESS, result=[back])
        self._compare(
            claim.slot,
            lambda storage: storage.mark_done(claim.task_id, result),
            lambda: self._model.mark_done(self._owners[claim.slot], claim.task_id, [back]),
        )

    @step(3, needs="_claims", back=BACK, is_current=MOSTLY_TRUE, will_retry=st.booleans())
    def mark_failed(self, back: int, is_current: bool, will_retry: bool) -> None:
        claim, error = self._pick(back, is_current), an_error(self._clock.now())
        self._compare(
            claim.slot,
            lambda storage: storage.mark_failed(claim.task_id, error, will_retry),
            lambda: self._model.mark_failed(
                self._owners[claim.slot], claim.task_id, error, will_retry
            ),
        )

    @step(2, needs="_claims", back=BACK, is_current=MOSTLY_TRUE, after=SECONDS)
    def reschedule(self, back: int, is_current: bool, after: int) -> None:
        claim, eta = self._pick(back, is_current), self._at(after)
        self._compare(
            claim.slot,
            lambda storage: storage.reschedule(claim.task_id, eta),
            lambda: self._model.reschedule(self._owners[claim.slot], claim.task_id, eta),
        )

    @step(1, needs="_claims", back=BACK, is_current=MOSTLY_TRUE)
    def mark_running(self, back: int, is_current: bool) -> None:
        claim = self._pick(back, is_current)
        self._compare(
            claim.slot,
            lambda storage: storage.mark_running(claim.task_id),
            lambda: self._model.mark_running(self._owners[claim.slot], claim.task_id),
        )

    @step(2, needs="_claims", back=BACK, is_current=MOSTLY_TRUE, checkpoint=st.binary(max_size=2))
    def save_checkpoint(self, back: int, is_current: bool, checkpoint: bytes) -> None:
        claim = self._pick(back, is_current)
        task_id, token = claim.task_id, claim.token
        self._compare(
            claim.slot,
            lambda storage: storage.save_checkpoint(task_id, token, checkpoint),
            lambda: self._model.save_checkpoint(
                self._owners[claim.slot], task_id, token, checkpoint
            ),
        )

    @step(1, needs="_claims", back=BACK, is_current=MOSTLY_TRUE)
    def report_progress(self, back: int, is_current: bool) -> None:
        claim = self._pick(back, is_current)
        report = Progress(task_id=claim.task_id, token=claim.token, fraction=back / 12)
        self._compare(
            claim.slot,
            lambda storage: storage.report_progress([report]),
            lambda: self._model.report_progress(self._owners[claim.slot], report),
        )

    @step(2, needs="_claims", back=BACK, is_current=MOSTLY_TRUE, again=st.booleans())
    def append_output(self, back: int, is_current: bool, again: bool) -> None:
        claim = self._pick(back, is_current)
        known = len(self._model.output(claim.task_id) or ())
        record = self._model.tasks.live.get(claim.task_id)
        end = 0 if record is None else len(record.output.get(claim.token, ()))
        first = end if again and end else end + 1
        batch = an_output(claim.task_id, claim.token, known, {"n": known}, first=first)
        self._compare(
            claim.slot,
            lambda storage: storage.append_output([batch]),
            lambda: self._model.append_output(self._owners[claim.slot], batch),
        )

    # Owners and time

    @step(4, seconds=st.sampled_from((1.0, 0.000001, 3.5, 5.0, 9.0, 30.0, 61.0)))
    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    @step(1, slot=SLOT)
    def renew(self, slot: int) -> None:
        self._compare(
            slot,
            lambda storage: storage.renew(),
            lambda: self._model.renew(self._owners[slot]),
        )

    @step(4, slot=SLOT, silence=st.sampled_from((0.0, 9.0, 9.0)))
    def give_back_abandoned(self, slot: int, silence: float) -> None:
        self._clock.advance(silence)

        async def call(storage: BaseStorage) -> Any:
            # The contract does not order the owners.
            return sorted(await storage.give_back_abandoned(), key=lambda back: back.task_id)

        self._compare(
            slot,
            call,
            lambda: sorted(self._model.give_back_abandoned(), key=lambda back: back.task_id),
        )

    @step(1, slot=SLOT)
    def mark_restored(self, slot: int) -> None:
        self._compare(
            slot, lambda storage: storage.mark_restored(), lambda: self._model.mark_restored()
        )

    @step(1, slot=SLOT)
    def crash(self, slot: int) -> None:
        for tested in self._stores:
            self._run(tested.crash(slot))
        self._owners[slot] = self._model.open_owner()
        self._open_owner(slot)

    @step(1, slot=SLOT, replace=st.booleans())
    def close(self, slot: int, replace: bool) -> None:
        for tested in self._stores:
            self._run(tested.storages[slot].close())
        self._model.close_owner(self._owners[slot])
        if replace:
            self._owners[slot] = self._model.open_owner()
            self._open_owner(slot)
            return
        self._model.reopen_owner(self._owners[slot])
        for tested in self._stores:
            self._run(tested.storages[slot].open())
            tested.map_owner(slot, self._owners[slot])

    @step(1, by_crash=st.booleans())
    def restart(self, by_crash: bool) -> None:
        for slot in range(SLOTS):
            for tested in self._stores:
                self._run(tested.crash(slot) if by_crash else tested.storages[slot].close())
            if not by_crash:
                self._model.close_owner(self._owners[slot])
        # A real restart takes time, and a backend may order tasks by the clock across it.
        self._clock.advance(0.001)
        for tested in self._stores:
            self._run(tested.store.reopen())
        for slot in range(SLOTS):
            self._owners[slot] = self._model.open_owner()
            self._open_owner(slot)

    def _open_owner(self, slot: int) -> None:
        for tested in self._stores:
            self._run(tested.open_owner(slot, self._owners[slot]))

    # Other verbs

    @step(2, needs="_ids", slot=SLOT, back=BACK)
    def cancel(self, slot: int, back: int) -> None:
        task_id = self._some_id(back)
        self._compare(
            slot,
            lambda storage: storage.cancel(task_id, "not wanted"),
            lambda: self._model.cancel(task_id, "not wanted"),
        )

    @step(
        2, needs="_ids", slot=SLOT, back=BACK, priority=st.sampled_from((None, 1, -1)),
        queue=st.sampled_from((None, *QUEUES)), after=st.sampled_from((None, *CHANGED_ETAS)),
    )  # fmt: skip
    def change_task(
        self, slot: int, back: int, priority: int | None, queue: str | None, after: int | None
    ) -> None:
        task_id = self._some_id(back)
        eta = None if after is None else self._at(after)
        changes = {"priority": priority, "queue": queue, "eta": eta}
        given: dict[str, Any] = {
            name: value for name, value in changes.items() if value is not None
        } or {"priority": 0}
        self._compare(
            slot,
            lambda storage: storage.change_task(task_id, **given),
            lambda: self._model.change_task(task_id, **given),
        )

    @step(1, needs="_ids", slot=SLOT, back=BACK)
    def run_task_now(self, slot: int, back: int) -> None:
        task_id = self._some_id(back)
        self._compare(
            slot,
            lambda storage: storage.run_task_now(task_id),
            lambda: self._model.change_task(task_id, eta=None),
        )

    @step(1, slot=SLOT, seconds=st.sampled_from((0, 3, 20)))
    def purge_results(self, slot: int, seconds: int) -> None:
        older_than = self._at(-seconds)
        self._compare(
            slot,
            lambda storage: storage.purge_results(older_than),
            lambda: self._model.purge_results(older_than),
        )

    @step(1, slot=SLOT)
    def purge_expired(self, slot: int) -> None:
        self._compare(
            slot, lambda storage: storage.purge_expired(), lambda: self._model.purge_expired()
        )

    @step(2, needs="_ids", slot=SLOT, back=BACK, is_dead=MOSTLY_TRUE, from_start=st.booleans())
    def retry_dead(self, slot: int, back: int, is_dead: bool, from_start: bool) -> None:
        task_id = self._some_dead(back) if is_dead else self._some_id(back)
        self._compare(
            slot,
            lambda storage: storage.retry_dead(task_id, from_start=from_start),
            lambda: self._model.retry_dead(task_id, from_start=from_start),
        )

    @step(1, needs="_ids", slot=SLOT, back=BACK)
    def take_hook(self, slot: int, back: int) -> None:
        task_id = self._some_dead(back)

        async def take(storage: BaseStorage) -> bool:
            hook = await storage.pending_hook(task_id)
            return hook is not None and await storage.take_hook(hook)

        self._compare(slot, take, lambda: self._model.take_hook(self._owners[slot], task_id))

    @step(1, needs="_ids", slot=SLOT, back=BACK, is_current=MOSTLY_TRUE)
    def end_hook(self, slot: int, back: int, is_current: bool) -> None:
        task_id = self._some_dead(back)
        _, token, _ = self._model.tasks.hooks.get(task_id, ("", 1, ""))
        token += not is_current
        self._compare(
            slot,
            lambda storage: storage.end_hook(task_id, token),
            lambda: self._model.end_hook(task_id, token),
        )

    @step(1, needs="_ids", slot=SLOT, back=BACK, is_dead=MOSTLY_TRUE)
    def delete_dead(self, slot: int, back: int, is_dead: bool) -> None:
        task_id = self._some_dead(back) if is_dead else self._some_id(back)
        self._compare(
            slot,
            lambda storage: storage.delete_dead(task_id),
            lambda: self._model.delete_dead(task_id),
        )

    @step(1, slot=SLOT, seconds=st.sampled_from((0, 3, 20)))
    def purge_dead(self, slot: int, seconds: int) -> None:
        older_than = self._at(-seconds)
        self._compare(
            slot,
            lambda storage: storage.purge_dead(older_than),
            lambda: self._model.purge_dead(older_than),
        )

    @step(
        1,
        slot=SLOT,
        queue=st.sampled_from(QUEUES),
        is_paused=st.sampled_from((False, False, True)),
    )
    def pause(self, slot: int, queue: str, is_paused: bool) -> None:
        def change() -> None:
            (self._model.paused.add if is_paused else self._model.paused.discard)(queue)

        self._compare(
            slot,
            lambda storage: (storage.pause_queue if is_paused else storage.resume_queue)(queue),
            change,
        )

    @step(1, slot=SLOT)
    def close_breaker(self, slot: int) -> None:
        async def close(storage: BaseStorage) -> None:
            # Whether the store knows the breaker depends on more than claims.
            await storage.close_breaker("smtp")

        self._compare(slot, close, lambda: self._model.tasks.gates.close_breaker("smtp"))

    @step(1, slot=SLOT, limit=st.integers(1, 4), status=st.sampled_from((None, *TaskStatus)))
    def page_through(self, slot: int, limit: int, status: TaskStatus | None) -> None:
        async def pages(storage: BaseStorage) -> list[str]:
            ids: list[str] = []
            while page := await storage.list_tasks(
                limit=limit, status=status, after=ids[-1] if ids else None
            ):
                ids += [task.id for task in page]
            return ids

        self._compare(
            slot,
            pages,
            lambda: [
                task_id
                for task_id, record in self._model.tasks.visible_tasks().items()
                if status in (None, record.status)
            ],
        )

    # Checks after every step

    def _check_views_match(self) -> None:
        self._steps += 1
        names = [owner.name for owner in self._owners]
        expected = model_view(self._model, names, list(self._ids))
        # Every step lists all tasks. Other views are read where the model changed, and all of them
        # at every eighth step: an unexpected change shows a few steps later.
        is_full = self._steps % 8 == 0

        def to_read(views: Iterable[str]) -> list[str]:
            return [each for each in views if is_full or self._expected.get(each) != expected[each]]

        ids, store_views = to_read(self._ids), to_read(STORE_VIEWS)
        for tested in self._stores:
            seen = self._run(tested.view(self._steps % SLOTS, names, ids, store_views))
            for name, value in seen.items():
                _check_same(tested, value, expected[name], name)
        self._expected = expected
        self._check_promises(expected["list_tasks"])

    def _check_promises(self, tasks: dict[str, Task]) -> None:
        """Invariants that do not depend on the model."""
        keys = [task.unique for task in tasks.values() if task.unique and not task.status.is_final]
        assert len(keys) == len(set(keys)), "two live tasks have one unique key"
        for task_id, task in tasks.items():
            assert task.token >= self._tokens.get(task_id, 0), f"the token of {task_id} shrank"
            assert (task.owner is not None) or task.status is not TaskStatus.RUNNING
        self._tokens = {task_id: task.token for task_id, task in tasks.items()}

    # Helpers of the steps

    def _run(self, call: Awaitable[Any]) -> Any:
        return self._runner.get_loop().run_until_complete(call)

    def _compare(
        self, slot: int, call: Callable[[BaseStorage], Awaitable[Any]], model: Callable[[], Any]
    ) -> Any:
        """Make a call on all stores, check it against the model, and return the model's result."""
        answers = [(tested, self._run(tested.answer(slot, call))) for tested in self._stores]
        expected = answer_of(model)
        note(f"  {self._owners[slot].name} → {brief(expected)}")
        for tested, answer in answers:
            wanted = list(expected) if isinstance(expected, tuple) else expected
            _check_same(tested, answer, wanted, "answer")
            tested.map_owner(slot, self._owners[slot])
        return expected

    def _at(self, seconds: int) -> datetime:
        return self._clock.now() + timedelta(seconds=seconds)

    def _task(self, spec: TaskSpec) -> Task:
        task_id = spec.name or f"n{len(self._ids):02}"
        self._ids[task_id] = None
        gate = self._gates[spec.gate % len(self._gates)]
        return task_of(spec, task_id, gate, args=(self._steps, task_id), now=self._clock.now())

    def _pick(self, back: int, is_current: bool) -> Claimed:
        """A claim made earlier; with `is_current`, one that is still held if there is any."""
        held = [
            claim
            for claim in self._claims
            if self._model.held_by(self._owners[claim.slot].name).get(claim.task_id) == claim.token
        ]
        claims = held if held and is_current else self._claims
        return claims[-1 - back % len(claims)]

    def _some_id(self, back: int) -> str:
        ids = list(self._ids)
        return ids[-1 - back % len(ids)]

    def _some_dead(self, back: int) -> str:
        dead = list(self._model.tasks.dead)
        return dead[-1 - back % len(dead)] if dead else self._some_id(back)

    def _outcome(self, spec: OutcomeSpec) -> tuple[int, Outcome]:
        """The outcome, and the slot of the claim it is for."""
        claim = self._pick(spec.back, spec.is_current)
        record = self._model.tasks.live.get(claim.task_id)
        repeats = record is not None and record.repeats
        return claim.slot, outcome_of(spec, claim, now=self._clock.now(), repeats=repeats)


def _check_same(tested: StoreUnderTest, seen: Any, wanted: Any, name: str) -> None:
    if seen != wanted:
        found = "; ".join(differences(seen, wanted, name))
        raise AssertionError(f"{tested.label} differs from the model: {found}")


def state_machine_for(open_store: OpenStore) -> type[StorageStateMachine]:
    """The state machine for the stores that `open_store` creates."""
    return type(
        "StorageStateMachine", (StorageStateMachine,), {"open_store": staticmethod(open_store)}
    )
