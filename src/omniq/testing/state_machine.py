"""A game of chance between a backend, the reference and the model: same moves, same answers.

Several owners share one store and one clock. Each move is made on the backend under test, on a
`MemoryStorage` and on the model; all three must answer the same and show the same afterwards.

    TestMine = machine_for(open_my_store).TestCase

where `open_my_store(clock, settings, max_pending)` makes an empty `Store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from omniq.models import Progress, Task, TaskResult, TaskStatus
from omniq.outcomes import Outcome
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.testing.clock import ManualClock
from omniq.testing.model import Model, Owner
from omniq.testing.model_views import model_look
from omniq.testing.state_machine_moves import (
    BACK,
    BATCH,
    ENDINGS,
    FLAVOURS,
    MOSTLY,
    NEEDS,
    PLACE,
    PLACES,
    QUEUES,
    SECONDS,
    WHEN,
    WHICH_QUEUES,
    Choice,
    Claimed,
    Ending,
    Wish,
    an_error,
    choices,
    move,
    outcome_of,
    task_of,
    wishes,
)
from omniq.testing.state_machine_stores import (
    TOPICS,
    MemoryStore,
    OpenStore,
    Side,
    answer_of,
    brief,
    differences,
)

SETTINGS = Settings(lease=9.0, result_ttl=60.0, max_crashes=2, durability="os")


class StorageMachine(RuleBasedStateMachine):
    """Plays `open_store` against the reference and the model. Use `machine_for` to make one."""

    open_store: ClassVar[OpenStore]

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._clock = ManualClock()
        self._sides: list[Side] = []
        self._owners: list[Owner] = []
        self._claims: list[Claimed] = []
        self._calls: list[tuple[str, list[Task]]] = []
        self._claim_ids: list[tuple[int, str]] = []
        self._tokens: dict[str, int] = {}
        self._ids: dict[str, None] = {}
        self._moves = 0
        self._seen: dict[str, Any] = {}

    @initialize(max_pending=st.sampled_from((None, None, None, 5, 9)), gates=FLAVOURS, wishes=BATCH)
    def open(self, max_pending: int | None, gates: tuple[str, ...], wishes: list[Wish]) -> None:
        self._model = Model(self._clock, SETTINGS, max_pending)
        self._gates = gates
        make = type(self).open_store
        self._sides = [Side("the backend", make(self._clock, SETTINGS, max_pending))]
        if make is not MemoryStore:
            reference = MemoryStore(self._clock, SETTINGS, max_pending)
            self._sides.append(Side("the reference", reference))
        for place in range(PLACES):
            self._owners.append(self._model.open_owner())
            self._sit_down(place)
        self.enqueue_many(0, wishes)
        self._check_all_show_the_same()

    def teardown(self) -> None:
        try:
            for side in self._sides:
                for storage in side.objects:
                    self._run(storage.close())
                self._run(side.store.discard())
        finally:
            self._runner.close()

    # A rule of its own for each move would let Hypothesis leave out half of them in every game: a
    # game without claims shows nothing.
    @rule(move=choices())
    def play(self, move: Choice) -> None:
        name, arguments = move
        if not NEEDS[name] or getattr(self, NEEDS[name]):
            getattr(self, name)(**arguments)
            self._check_all_show_the_same()

    @move(1)
    def rest(self) -> None:
        """Do nothing: what a move that does not matter shrinks to."""

    # Enqueue

    @move(3, place=PLACE, wish=wishes())
    def enqueue(self, place: int, wish: Wish) -> None:
        task = self._task(wish)
        self._compare(
            place,
            lambda storage: storage.enqueue(task),
            lambda: self._model.enqueue_many([task])[0],
        )

    @move(3, place=PLACE, wishes=BATCH)
    def enqueue_many(self, place: int, wishes: list[Wish]) -> None:
        tasks = [self._task(wish) for wish in wishes]
        nonce = f"nonce-{len(self._calls)}"
        self._calls.append((nonce, tasks))
        self._enqueue_many(place, nonce, tasks)

    @move(1, needs="_calls", place=PLACE, back=BACK)
    def repeat_an_enqueue_whose_reply_was_lost(self, place: int, back: int) -> None:
        nonce, tasks = self._calls[-1 - back % len(self._calls)]
        self._enqueue_many(place, nonce, tasks)

    def _enqueue_many(self, place: int, nonce: str, tasks: list[Task]) -> None:
        self._compare(
            place,
            lambda storage: storage.enqueue_many(tasks, nonce=nonce),
            lambda: self._model.enqueue_many(tasks, nonce),
        )

    # Claim

    @move(7, place=PLACE, limit=st.integers(1, 6), when=WHEN, queues=WHICH_QUEUES)
    def reserve(
        self, place: int, limit: int, when: int | None, queues: Sequence[str] | None
    ) -> None:
        claim_id = f"claim-{self._moves}"
        self._claim_ids.append((place, claim_id))
        self._reserve(place, [], limit, when, queues, claim_id)

    @move(1, needs="_claim_ids", back=st.integers(0, 3))
    def repeat_a_claim_whose_reply_was_lost(self, back: int) -> None:
        place, claim_id = self._claim_ids[-1 - back % len(self._claim_ids)]
        self._reserve(place, [], 2, None, None, claim_id)

    @move(2, place=PLACE, when=SECONDS)
    def dequeue(self, place: int, when: int) -> None:
        now = self._at(when)
        claimed = self._compare(
            place,
            lambda storage: storage.dequeue(now),
            lambda: next(
                iter(self._model.record_and_reserve(self._owners[place], [], 1, now)[1]), None
            ),
        )
        if isinstance(claimed, Task):
            self._remember(place, [claimed])

    @move(
        6,
        place=PLACE,
        endings=st.lists(ENDINGS, max_size=3),
        limit=st.integers(1, 3),
        queues=WHICH_QUEUES,
    )
    def record_and_reserve(
        self, place: int, endings: list[Ending], limit: int, queues: Sequence[str] | None
    ) -> None:
        outcomes = [self._outcome(ending)[1] for ending in endings if self._claims]
        self._reserve(place, outcomes, limit, None, queues, None)

    def _reserve(
        self,
        place: int,
        outcomes: list[Outcome],
        limit: int,
        when: int | None,
        queues: Sequence[str] | None,
        claim_id: str | None,
    ) -> None:
        now = None if when is None else self._at(when)
        answer = self._compare(
            place,
            lambda storage: storage.record_and_reserve(
                outcomes, limit, now, queues=queues, claim_id=claim_id
            ),
            lambda: self._model.record_and_reserve(
                self._owners[place], outcomes, limit, now, queues, claim_id
            ),
        )
        if isinstance(answer, tuple):
            self._remember(place, answer[1])

    def _remember(self, place: int, tasks: list[Task]) -> None:
        for task in tasks:
            claim = Claimed(place, task.id, task.token)
            if claim not in self._claims:
                self._claims.append(claim)

    # Record

    @move(
        7,
        needs="_claims",
        endings=st.lists(ENDINGS, min_size=1, max_size=3),
        by=st.sampled_from((None, None, None, None, *range(PLACES))),
    )
    def record(self, endings: list[Ending], by: int | None) -> None:
        place, first = self._outcome(endings[0])
        place = place if by is None else by
        outcomes = [first, *(self._outcome(ending)[1] for ending in endings[1:])]
        self._compare(
            place,
            lambda storage: storage.record(outcomes),
            lambda: self._model.record_and_reserve(self._owners[place], outcomes, 0)[0],
        )

    @move(3, needs="_claims", back=BACK, is_current=MOSTLY)
    def mark_done(self, back: int, is_current: bool) -> None:
        claim = self._pick(back, is_current)
        result = TaskResult(task_id=claim.task_id, status=TaskStatus.SUCCESS, result=[back])
        self._compare(
            claim.place,
            lambda storage: storage.mark_done(claim.task_id, result),
            lambda: self._model.mark_done(self._owners[claim.place], claim.task_id, [back]),
        )

    @move(3, needs="_claims", back=BACK, is_current=MOSTLY, will_retry=st.booleans())
    def mark_failed(self, back: int, is_current: bool, will_retry: bool) -> None:
        claim, error = self._pick(back, is_current), an_error(self._clock.now())
        self._compare(
            claim.place,
            lambda storage: storage.mark_failed(claim.task_id, error, will_retry),
            lambda: self._model.mark_failed(
                self._owners[claim.place], claim.task_id, error, will_retry
            ),
        )

    @move(2, needs="_claims", back=BACK, is_current=MOSTLY, after=SECONDS)
    def reschedule(self, back: int, is_current: bool, after: int) -> None:
        claim, eta = self._pick(back, is_current), self._at(after)
        self._compare(
            claim.place,
            lambda storage: storage.reschedule(claim.task_id, eta),
            lambda: self._model.reschedule(self._owners[claim.place], claim.task_id, eta),
        )

    @move(1, needs="_claims", back=BACK, is_current=MOSTLY)
    def mark_running(self, back: int, is_current: bool) -> None:
        claim = self._pick(back, is_current)
        self._compare(
            claim.place,
            lambda storage: storage.mark_running(claim.task_id),
            lambda: self._model.mark_running(self._owners[claim.place], claim.task_id),
        )

    @move(2, needs="_claims", back=BACK, is_current=MOSTLY, checkpoint=st.binary(max_size=2))
    def save_checkpoint(self, back: int, is_current: bool, checkpoint: bytes) -> None:
        claim = self._pick(back, is_current)
        task_id, token = claim.task_id, claim.token
        self._compare(
            claim.place,
            lambda storage: storage.save_checkpoint(task_id, token, checkpoint),
            lambda: self._model.save_checkpoint(
                self._owners[claim.place], task_id, token, checkpoint
            ),
        )

    @move(1, needs="_claims", back=BACK, is_current=MOSTLY)
    def report_progress(self, back: int, is_current: bool) -> None:
        claim = self._pick(back, is_current)
        report = Progress(task_id=claim.task_id, token=claim.token, fraction=back / 12)
        self._compare(
            claim.place,
            lambda storage: storage.report_progress([report]),
            lambda: self._model.report_progress(self._owners[claim.place], report),
        )

    # Owners and time

    @move(4, seconds=st.sampled_from((1.0, 0.000001, 3.5, 5.0, 9.0, 30.0, 61.0)))
    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    @move(1, place=PLACE)
    def renew(self, place: int) -> None:
        self._compare(
            place,
            lambda storage: storage.renew(),
            lambda: self._model.renew(self._owners[place]),
        )

    @move(4, place=PLACE, silence=st.sampled_from((0.0, 9.0, 9.0)))
    def give_back_abandoned(self, place: int, silence: float) -> None:
        self._clock.advance(silence)

        async def call(storage: BaseStorage) -> Any:
            # Owners are not ordered: any order will do.
            return sorted(await storage.give_back_abandoned(), key=lambda back: back.task_id)

        self._compare(
            place,
            call,
            lambda: sorted(self._model.give_back_abandoned(), key=lambda back: back.task_id),
        )

    @move(1, place=PLACE)
    def crash(self, place: int) -> None:
        for side in self._sides:
            self._run(side.crash(place))
        self._owners[place] = self._model.open_owner()
        self._sit_down(place)

    @move(1, place=PLACE, anew=st.booleans())
    def close(self, place: int, anew: bool) -> None:
        for side in self._sides:
            self._run(side.objects[place].close())
        self._model.close_owner(self._owners[place])
        if anew:
            self._owners[place] = self._model.open_owner()
            self._sit_down(place)
            return
        self._model.reopen_owner(self._owners[place])
        for side in self._sides:
            self._run(side.objects[place].open())
            side.learn_name(place, self._owners[place])

    @move(1, by_crash=st.booleans())
    def restart(self, by_crash: bool) -> None:
        for place in range(PLACES):
            for side in self._sides:
                self._run(side.crash(place) if by_crash else side.objects[place].close())
            if not by_crash:
                self._model.close_owner(self._owners[place])
        # No restart takes no time: a backend may order tasks by the clock across one.
        self._clock.advance(0.001)
        for side in self._sides:
            self._run(side.store.reopen())
        for place in range(PLACES):
            self._owners[place] = self._model.open_owner()
            self._sit_down(place)

    def _sit_down(self, place: int) -> None:
        for side in self._sides:
            self._run(side.sit_down(place, self._owners[place]))

    # The rest of the verbs

    @move(2, needs="_ids", place=PLACE, back=BACK)
    def cancel(self, place: int, back: int) -> None:
        task_id = self._some_id(back)
        self._compare(
            place,
            lambda storage: storage.cancel(task_id, "not wanted"),
            lambda: self._model.cancel(task_id, "not wanted"),
        )

    @move(1, place=PLACE, seconds=st.sampled_from((0, 3, 20)))
    def purge_results(self, place: int, seconds: int) -> None:
        older_than = self._at(-seconds)
        self._compare(
            place,
            lambda storage: storage.purge_results(older_than),
            lambda: self._model.purge_results(older_than),
        )

    @move(1, place=PLACE)
    def purge_expired(self, place: int) -> None:
        self._compare(
            place, lambda storage: storage.purge_expired(), lambda: self._model.purge_expired()
        )

    @move(2, needs="_ids", place=PLACE, back=BACK, is_dead=MOSTLY, from_start=st.booleans())
    def retry_dead(self, place: int, back: int, is_dead: bool, from_start: bool) -> None:
        task_id = self._some_dead(back) if is_dead else self._some_id(back)
        self._compare(
            place,
            lambda storage: storage.retry_dead(task_id, from_start=from_start),
            lambda: self._model.retry_dead(task_id, from_start=from_start),
        )

    @move(1, needs="_ids", place=PLACE, back=BACK, is_dead=MOSTLY)
    def delete_dead(self, place: int, back: int, is_dead: bool) -> None:
        task_id = self._some_dead(back) if is_dead else self._some_id(back)
        self._compare(
            place,
            lambda storage: storage.delete_dead(task_id),
            lambda: self._model.delete_dead(task_id),
        )

    @move(1, place=PLACE, seconds=st.sampled_from((0, 3, 20)))
    def purge_dead(self, place: int, seconds: int) -> None:
        older_than = self._at(-seconds)
        self._compare(
            place,
            lambda storage: storage.purge_dead(older_than),
            lambda: self._model.purge_dead(older_than),
        )

    @move(
        1,
        place=PLACE,
        queue=st.sampled_from(QUEUES),
        is_paused=st.sampled_from((False, False, True)),
    )
    def pause(self, place: int, queue: str, is_paused: bool) -> None:
        def change() -> None:
            (self._model.paused.add if is_paused else self._model.paused.discard)(queue)

        self._compare(
            place,
            lambda storage: (storage.pause_queue if is_paused else storage.resume_queue)(queue),
            change,
        )

    @move(1, place=PLACE, limit=st.integers(1, 4), status=st.sampled_from((None, *TaskStatus)))
    def page_through(self, place: int, limit: int, status: TaskStatus | None) -> None:
        async def pages(storage: BaseStorage) -> list[str]:
            ids: list[str] = []
            while page := await storage.list_tasks(
                limit=limit, status=status, after=ids[-1] if ids else None
            ):
                ids += [task.id for task in page]
            return ids

        self._compare(
            place,
            pages,
            lambda: [
                task_id
                for task_id, record in self._model.book.known_tasks().items()
                if status in (None, record.status)
            ],
        )

    # After every move

    def _check_all_show_the_same(self) -> None:
        self._moves += 1
        names = [owner.name for owner in self._owners]
        expected = model_look(self._model, names, list(self._ids))
        # Every task is listed every time. The rest is asked where something should have changed,
        # and of all tasks now and then: what changed against the rules shows a little later.
        is_full = self._moves % 8 == 0

        def asked(all_of: Iterable[str]) -> list[str]:
            return [each for each in all_of if is_full or self._seen.get(each) != expected[each]]

        ids, topics = asked(self._ids), asked(TOPICS)
        for side in self._sides:
            seen = self._run(side.look(self._moves % PLACES, names, ids, topics))
            for what, value in seen.items():
                _check_same(side, value, expected[what], what)
        self._seen = expected
        self._check_promises(expected["list_tasks"])

    def _check_promises(self, tasks: dict[str, Task]) -> None:
        """What must hold even if the model is wrong about it."""
        keys = [task.unique for task in tasks.values() if task.unique and not task.status.is_final]
        assert len(keys) == len(set(keys)), "two live tasks have one unique key"
        for task_id, task in tasks.items():
            assert task.token >= self._tokens.get(task_id, 0), f"the token of {task_id} shrank"
            assert (task.owner is not None) or task.status is not TaskStatus.RUNNING
        self._tokens = {task_id: task.token for task_id, task in tasks.items()}

    # Writing moves down

    def _run(self, call: Awaitable[Any]) -> Any:
        return self._runner.get_loop().run_until_complete(call)

    def _compare(
        self, place: int, call: Callable[[BaseStorage], Awaitable[Any]], model: Callable[[], Any]
    ) -> Any:
        """Make a move on all sides; the model's answer, which is everybody's."""
        answers = [(side, self._run(side.answer(place, call))) for side in self._sides]
        expected = answer_of(model)
        note(f"  {self._owners[place].name} → {brief(expected)}")
        for side, answer in answers:
            wanted = list(expected) if isinstance(expected, tuple) else expected
            _check_same(side, answer, wanted, "answer")
            side.learn_name(place, self._owners[place])
        return expected

    def _at(self, seconds: int) -> datetime:
        return self._clock.now() + timedelta(seconds=seconds)

    def _task(self, wish: Wish) -> Task:
        task_id = wish.name or f"n{len(self._ids):02}"
        self._ids[task_id] = None
        gate = self._gates[wish.gate % len(self._gates)]
        return task_of(wish, task_id, gate, args=(self._moves, task_id), now=self._clock.now())

    def _pick(self, back: int, is_current: bool) -> Claimed:
        """A claim that was made; with `is_current`, one that still holds if there is any."""
        held = [
            claim
            for claim in self._claims
            if self._model.held_by(self._owners[claim.place].name).get(claim.task_id) == claim.token
        ]
        claims = held if held and is_current else self._claims
        return claims[-1 - back % len(claims)]

    def _some_id(self, back: int) -> str:
        ids = list(self._ids)
        return ids[-1 - back % len(ids)]

    def _some_dead(self, back: int) -> str:
        dead = list(self._model.book.dead)
        return dead[-1 - back % len(dead)] if dead else self._some_id(back)

    def _outcome(self, ending: Ending) -> tuple[int, Outcome]:
        """The outcome, and the place of the claim it is for."""
        claim = self._pick(ending.back, ending.is_current)
        record = self._model.book.live.get(claim.task_id)
        repeats = record is not None and record.repeats
        return claim.place, outcome_of(ending, claim, now=self._clock.now(), repeats=repeats)


def _check_same(side: Side, seen: Any, wanted: Any, what: str) -> None:
    if seen != wanted:
        found = "; ".join(differences(seen, wanted, what))
        raise AssertionError(f"{side.label} differs from the model: {found}")


def machine_for(open_store: OpenStore) -> type[StorageMachine]:
    """The state machine that plays these stores."""
    return type("StorageMachine", (StorageMachine,), {"open_store": staticmethod(open_store)})
