"""A task as a storage holds it, and every change it may go through. Pure: no clock, no input or output.

Backends differ in how they find, lock and store rows; what a claim, an outcome, a cancellation or a
lost worker does to a row is written here, once. Instants are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Literal, assert_never

import msgspec

from omniq.clock import from_micros, seconds_to_micros, to_micros
from omniq.errors import SerializationError
from omniq.gate_rules import Effect, Gate, gates_of
from omniq.models import (
    Attempt,
    StoredLetter,
    Task,
    TaskError,
    TaskResult,
    TaskStatus,
    TaskWorkflow,
)
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Rescheduled,
    Retried,
    Snoozed,
    Succeeded,
    Suspended,
)

Instant = Annotated[int, msgspec.Meta(ge=-62_135_596_800_000_000, le=253_402_300_799_999_999)]
"""Microseconds since 1970 that a `datetime` can hold; a damaged record may have any number."""

LOST = "WorkerLost"
"""The type of the error of a task whose worker was lost."""

WENT_BACK = "store went back"
"""The reason of a dead letter that may have run before its store went back to an earlier state."""

EPOCH_BITS = 21
"""A token is below 2^21 in epoch 0, and at least epoch x 2^21 in later ones."""

NEVER = 253_402_300_799_000_000
"""The instant at which a record becomes visible that time alone never makes claimable."""

KEPT = 100 * 365 * 86_400_000_000
"""The `result_ttl` of a record that belongs to another: it is deleted with the topmost one."""

LAST_PLACE = 10**16
"""A place in line is below it. The turn of a row that has none is its place or its `due`, minus this: below 0."""

ROUND = 1_000_000
"""The length of a turn of weight 1 and cost 1."""

_LONGEST_STEP = 10**13
_LONGEST_LEAD = 50 * 365 * 86_400_000_000

FORMAT = 1
"""The newest format of a record that this code reads, and the one that it writes."""

# As globals of this module: reading a member of an enum takes Python 3.11 several times as long.
_PENDING, _RUNNING, _RETRYING = TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.RETRYING
_SUCCESS, _FAILED, _CANCELLED = TaskStatus.SUCCESS, TaskStatus.FAILED, TaskStatus.CANCELLED

MAX_HISTORY = 25
"""Attempts in the history of one task: the first, and the newest ones."""


class Workflow(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True, gc=False):
    """What a row has besides if it waits for others, if others wait for it, or if it belongs to another.

    A record of the kind `event` or `group` never runs: something else ends it. `parent` is the record it
    belongs to. It waits for the success of `after`, for any end of `after_any`, and when it is suspended for
    any end of `on`. `needs` is the number of those that have not ended so, of which it can do without
    `holds`; `failed` of them cannot be satisfied any more. `wait` is the number of its current wait: an edge
    of an earlier one is stale. `eta` is when a released task is due, at the earliest. `has_run`: it has been
    suspended, so that its `expires` does not end it.

    `edges` is the number of documents with edges that lead from it; earlier ends of a record that was put back
    have used `edges_done` of them. `members` is the number of live records
    that belong to it, `size` that of all it ever had; of a group, `failed` did not succeed. A group that is
    `is_open` gets more of them. With `stops`, the first that fails makes it cancel the others, and `is_stopped`.
    `result` is the encoded result of a task that has returned and whose children are still live. A task that
    `survives` is not cancelled with its parent.

    Of the tasks with one `sequence`, each waits for the one that it `follows` ('' until that is known), and knows
    the one that it is `followed_by`. With `halts`, its dead letter holds the next one.
    """

    kind: Literal["task", "event", "group"] = "task"
    parent: str | None = None
    after: tuple[str, ...] = ()
    after_any: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    needs: int = 0
    holds: int = 0
    failed: int = 0
    wait: int = 0
    eta: int | None = None
    has_run: bool = False
    edges: int = 0
    edges_done: int = 0
    members: int = 0
    size: int = 0
    is_open: bool = False
    stops: bool = False
    is_stopped: bool = False
    result: bytes | None = None
    survives: bool = False
    sequence: str | None = None
    halts: bool = False
    follows: str | None = None
    followed_by: str | None = None


class FairPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Whose turn a row takes, and how long that is.

    With `is_placed` it has got a place in line: its `turn`, as long as that is not below 0. See `fairness`.
    """

    key: str
    step: int
    is_placed: bool = False


class Row(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The authoritative record of a task that has not ended. Mutable, and private to storages.

    `due` is when the task should run; `visible` decides whether it is due at a given `now` (0 for a task
    without an eta: it is due at any time that the caller names). `turn` orders tasks of equal priority:
    it is `due`, unless another rule gives the task another place in line. `settled` is the token of the last claim
    that its owner ended by an outcome, which distinguishes a repeated outcome from a late one.
    `attached`: whether it may have a checkpoint, progress or newest result, to be deleted with it.
    `stored_at` is the store's time at the enqueue, and `format` the version of the record. `unique` is the
    name under which the task holds its unique key, `unique_aliases` are more of them: see `Seal.unique_names`.
    `occurrence` is the token after which the current occurrence of a repeating task began: it stays the same
    while that occurrence is retried. So does that of a dead letter, unless it is edited or runs from the start.
    `task_type` is for people, and for their dead letters.
    `on_conflict`: what its enqueue does if another task holds its unique key; None: nothing. `max_wait`: how long after
    the first call an enqueue may delay the holder. `held_until`: the key stays held until then, also when the
    task has ended. `replaced` are the calls that have replaced or extended it, and `waits_since` is when the
    first of them came after a failure. `fair` decides its `turn`; `lead` is how long before its `due` that is.
    """

    id: str
    seq: int = 0
    nonce: str = ""
    queue: str
    priority: int
    func_path: str
    body: bytes = b""
    due: Instant
    visible: Instant
    created_at: Instant
    status: TaskStatus = TaskStatus.PENDING
    attempts: int = 0
    crashes: int = 0
    releases: int = 0
    token: int = 0
    settled: int = 0
    owner: str | None = None
    started_at: Instant = 0
    cancel_requested: bool = False
    repeats: bool = False
    unique: str | None = None
    expires: Instant | None = None
    result_ttl: int = 0
    gates: tuple[Gate, ...] = ()
    parked: str | None = None
    history: tuple[Attempt, ...] = ()
    attached: bool = False
    turn: Instant | None = None
    stored_at: Instant = 0
    max_crashes: int | None = None
    workflow: Workflow | None = None
    format: int = FORMAT
    unique_aliases: tuple[str, ...] = ()
    occurrence: int = 0
    task_type: str | None = None
    on_conflict: Literal["replace", "extend"] | None = None
    max_wait: int | None = None
    held_until: Instant | None = None
    replaced: tuple[str, ...] = ()
    waits_since: Instant | None = None
    fair: FairPlace | None = None
    lead: int = 0

    @property
    def unique_names(self) -> tuple[str, ...]:
        """All names under which the task holds its unique key; none if it has no such key."""
        return () if self.unique is None else (self.unique, *self.unique_aliases)

    @property
    def order(self) -> tuple[int, int, int]:
        """A key that sorts rows in the order in which they are claimed."""
        return (-self.priority, self.due if self.turn is None else self.turn, self.seq)

    @property
    def runs(self) -> int:
        """The number of runs that failed or whose worker died."""
        return self.attempts + self.crashes

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died while it held the task: it may be the one that kills workers."""
        return self.crashes > 0


copy_of: Callable[[Row], Row] = Row.__copy__  # type: ignore[attr-defined]
"""A copy of a row, without the cost of the general `copy.copy`."""


class Finish(msgspec.Struct, frozen=True, gc=False):
    """How a task ended. `dead` is set when it also becomes a dead letter.

    `encoded` is the result in the serializer's encoding, if its outcome contained it. `hook` is that of a
    `Failed` outcome: the owner that calls `on_dead`, empty for any worker that has the function.
    """

    status: TaskStatus
    result: TaskResult
    dead: StoredLetter | None = None
    encoded: bytes | None = None
    hook: str | None = None


class Settled(msgspec.Struct, frozen=True, gc=False):
    """What recording an outcome requires besides storing the changed row.

    `result` is encoded, and to be stored although the task runs again (an interval's newest run);
    `failure` is the same of a run that failed, not encoded yet. `effect` is what the outcome means to the
    task's circuit breakers.
    """

    finish: Finish | None = None
    result: bytes | None = None
    effect: Effect = "neither"
    reason: str = ""
    failure: Finish | None = None


class FinishedRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The record of a task that has ended, stored until `expires_at`. `result` is encoded."""

    row: Row
    finished_at: int
    expires_at: int
    result: bytes


def row_of(task: Task, body: bytes, *, now: int, default_ttl: int, nonce: str) -> Row:
    """The row of a task that is about to be enqueued."""
    ttl = default_ttl if task.result_ttl is None else seconds_to_micros(task.result_ttl)
    due = now if task.eta is None else to_micros(task.eta)
    # Python passes more than 15 keywords as a dictionary, which takes twice as long.
    row = Row(
        id=task.id,
        nonce=nonce,
        queue=task.queue,
        priority=task.priority,
        func_path=task.func_path,
        body=body,
        due=due,
        turn=due,
        stored_at=now,
        visible=0 if task.eta is None else due,
        created_at=to_micros(task.created_at),
        attempts=task.attempts,
        unique=task.unique,
        result_ttl=ttl,
        max_crashes=task.max_crashes,
    )
    if task.interval is not None or task.cron is not None:
        row.repeats = True
    if task.expires is not None:
        row.expires = to_micros(task.expires)
    if task.limits or task.breakers:
        row.gates = gates_of(task)
    if task.task_type is not None:
        row.task_type = task.task_type
    if task.unique is not None:
        _hold_key(row, task, now)
    if task.fair is not None or task.ageing is not None:
        _choose_order(row, task)
    if task.workflow is not None:
        _join_workflow(row, task.workflow)
    return row


def _hold_key(row: Row, task: Task, now: int) -> None:
    if task.on_conflict != "keep":
        row.on_conflict = task.on_conflict
        row.max_wait = None if task.max_wait is None else seconds_to_micros(task.max_wait)
    if task.unique_for is not None:
        row.held_until = now + seconds_to_micros(task.unique_for)


def rank_of(task: Task) -> int:
    """The priority of the task's row. That of a task that ages is 0: its own decides its turn."""
    return task.priority if task.ageing is None else 0


def _choose_order(row: Row, task: Task) -> None:
    """Set the rank of a row among others, and what decides its turn. It has no place in line."""
    row.priority, row.lead, row.fair = rank_of(task), 0, None
    if task.ageing is not None:
        lead = round(task.ageing * 1_000_000) * task.priority
        row.lead = max(-_LONGEST_LEAD, min(lead, _LONGEST_LEAD))
    elif task.fair is not None:
        share = task.fair
        # Divided first: neither may be too large for the product.
        step = ROUND * min(share.cost / share.weight, _LONGEST_STEP)
        row.fair = FairPlace(share.key, max(1, min(round(step), _LONGEST_STEP)))
    come_to_wait(row, row.due)


def come_to_wait(row: Row, due: int) -> None:
    """Set when a row is due, and its turn. A row with a `fair` key gets its place when it is due."""
    row.due = due
    if row.fair is None:
        row.turn = due - row.lead
        return
    if row.fair.is_placed:
        row.fair = FairPlace(row.fair.key, row.fair.step)
    row.turn = _out_of_line(due)


def keep_place(row: Row, fair: FairPlace | None, turn: int) -> None:
    """Have a row that was claimed keep its turn. One with a `fair` key waits before all that have a place."""
    if fair is not None and turn >= 0:
        turn = _out_of_line(turn)
    row.fair, row.turn = fair, turn


def _out_of_line(instant: int) -> int:
    return max(0, min(instant, LAST_PLACE - 1)) - LAST_PLACE


def needs_place(row: Row) -> bool:
    """Whether the row comes to wait without a place in line, which its `fair` key decides."""
    return row.fair is not None and not row.fair.is_placed


def place(row: Row, turn: int) -> None:
    """Give a row its place in line."""
    assert row.fair is not None
    row.fair = FairPlace(row.fair.key, row.fair.step, is_placed=True)
    row.turn = turn


def is_in_line(row: Row) -> bool:
    """Whether a row waits at a place in line that its `fair` key has paid for."""
    return row.fair is not None and row.owner is None and row.order[1] >= 0


def _join_workflow(row: Row, given: TaskWorkflow) -> None:
    """Give the row what its task says of a workflow. An insertion adds what others say of it."""
    needs = len(given.after) + len(given.after_any)
    row.workflow = Workflow(
        kind=given.kind,
        parent=given.parent,
        after=given.after,
        after_any=given.after_any,
        needs=needs,
        eta=row.visible or None,
        is_open=given.is_open,
        stops=given.stops,
        survives=given.survives,
        sequence=given.sequence,
        halts=given.halts,
    )
    if given.parent is not None:
        row.result_ttl = KEPT
    if needs or given.kind != "task":
        hide(row, row.expires if given.kind == "task" else None)


def is_part_of(row: Row, given: TaskWorkflow) -> bool:
    """Whether the row belongs to the record that its task was enqueued with, and waits as it says."""
    workflow = row.workflow
    return workflow is not None and (
        (workflow.kind, workflow.parent, workflow.after, workflow.after_any, workflow.sequence)
        == (given.kind, given.parent, given.after, given.after_any, given.sequence)
        and workflow.halts == given.halts
    )


def is_waiting(row: Row) -> bool:
    """Whether the row waits for the ends of others."""
    workflow = row.workflow
    return (
        workflow is not None
        and (workflow.needs > workflow.holds or workflow.follows is not None)
        and row.owner is None
    )


def may_run(row: Row) -> bool:
    """Whether a claim may take the row when it is visible; a suspended task also at its deadline."""
    workflow = row.workflow
    if workflow is None:
        return True
    if workflow.kind != "task" or workflow.follows is not None:
        return False
    return workflow.needs <= workflow.holds or bool(workflow.on)


def is_changeable(row: Row) -> bool:
    """Whether the row will run: a group, an event, and a task that has returned will not."""
    workflow = row.workflow
    return workflow is None or (workflow.kind == "task" and workflow.result is None)


def survives(row: Row) -> bool:
    """Whether the row is not cancelled with its parent."""
    return row.workflow is not None and row.workflow.survives


def hide(row: Row, until: int | None) -> None:
    """Have no claim find the row until that instant. It keeps its place in line."""
    row.turn = row.order[1]
    row.due = row.visible = NEVER if until is None else until


def release(row: Row, now: int) -> None:
    """End the wait of a row: a claim may take it, at its eta or now."""
    workflow = row.workflow
    assert workflow is not None
    row.turn = row.order[1]
    row.due = row.visible = max(now, workflow.eta or 0)
    # If it waited for some of its sources only, the others may end while it waits for something else, such as a
    # retry or its children.
    row.workflow = msgspec.structs.replace(
        workflow, needs=0, holds=0, failed=0, on=(), eta=None, wait=workflow.wait + 1
    )


def end_wait(row: Row) -> None:
    """Forget a wait that has ended otherwise: what it waited for says nothing any more."""
    workflow = row.workflow
    if workflow is not None and (workflow.needs or workflow.on):
        row.workflow = msgspec.structs.replace(
            workflow, needs=0, holds=0, failed=0, on=(), wait=workflow.wait + 1
        )


def begin_wait(row: Row, on: tuple[str, ...], enough: int | None) -> None:
    """Have a row that is suspended wait for that many of these records; None: for all of them."""
    workflow = row.workflow or Workflow()
    row.workflow = msgspec.structs.replace(
        workflow,
        on=on,
        needs=len(on),
        holds=0 if enough is None else len(on) - enough,
        failed=0,
        wait=workflow.wait + 1,
        eta=None,
        has_run=True,
    )


def follow(row: Row, task_id: str | None) -> None:
    """Have a row wait for that task of its sequence; None: for none any more."""
    row.workflow = msgspec.structs.replace(row.workflow or Workflow(), follows=task_id)
    if task_id is not None:
        hide(row, row.expires)


def be_followed(row: Row, task_id: str | None) -> None:
    """Note which task of its sequence waits for the row."""
    row.workflow = msgspec.structs.replace(row.workflow or Workflow(), followed_by=task_id)
    row.attached = True


def put_back(row: Row) -> None:
    """Have a record that had ended live again: it waits for nothing, and what it has released stays so."""
    workflow = row.workflow
    if workflow is not None:
        row.workflow = msgspec.structs.replace(
            workflow,
            needs=0,
            holds=0,
            failed=workflow.failed if workflow.kind == "group" else 0,
            on=(),
            wait=workflow.wait + 1,
            edges_done=workflow.edges,
            result=None,
            is_stopped=False,
        )


def rejoin(parent: Row, status: TaskStatus) -> None:
    """Count a member again that had ended with that status."""
    workflow = parent.workflow
    if workflow is not None:
        was_counted = status is not _SUCCESS and workflow.kind == "group"
        parent.workflow = msgspec.structs.replace(
            workflow, members=workflow.members + 1, failed=workflow.failed - was_counted
        )


def finish_group(row: Row, now: int) -> Finish:
    """The end of a group whose last member has ended."""
    assert row.workflow is not None
    if row.cancel_requested:
        return finish_cancelled(row, now, "by request")
    failed = row.workflow.failed
    result = TaskResult(
        task_id=row.id,
        status=_FAILED if failed else _SUCCESS,
        error=TaskError(
            f"{failed} of {row.workflow.size} did not succeed",
            error_type="ChildrenFailed",
            timestamp=from_micros(now),
        )
        if failed
        else None,
        finished_at=from_micros(now),
    )
    return Finish(status=result.status, result=result)


def finish_event(row: Row, now: int, encoded: bytes) -> Finish:
    """The end of an event that was given its value."""
    result = TaskResult(task_id=row.id, status=_SUCCESS, finished_at=from_micros(now))
    return Finish(status=_SUCCESS, result=result, encoded=encoded)


def finish_returned(row: Row, now: int) -> Finish:
    """The end of a task that has returned, after that of its last child."""
    assert row.workflow is not None
    result = TaskResult(task_id=row.id, status=_SUCCESS, finished_at=from_micros(now))
    return Finish(status=_SUCCESS, result=result, encoded=row.workflow.result)


def check_body(row: Row, task: Task) -> None:
    """Raise `SerializationError` for a body that was enqueued as another task than its row says.

    A body may be signed and a row is not: a signed call must not be run under another id, from
    another queue, or after its `expires`.
    """
    is_same = (task.id, task.func_path, task.queue) == (row.id, row.func_path, row.queue)
    if task.expires is not None:
        expires = to_micros(task.expires)
        # A claim may leave out the row's `expires`: the task had not expired when it was claimed.
        is_same = is_same and (
            expires > row.started_at if row.expires is None else expires == row.expires
        )
    if not is_same:
        raise SerializationError(
            f"task {row.id}: its stored body belongs to task {task.id} of {task.func_path}, queue "
            f"{task.queue}"
        )


def task_of(row: Row, task: Task) -> Task:
    """The task in the state that its row has now; `task` is the task as enqueued."""
    try:
        eta: datetime | None = from_micros(row.due)
        started_at = from_micros(row.started_at) if row.started_at else None
    except OverflowError as error:
        raise SerializationError(f"task {row.id}: a time in its record is out of range") from error
    if row.occurrence:
        # Apart from the others: few tasks repeat, and each claim comes through here.
        task = msgspec.structs.replace(task, occurrence=row.occurrence)
    if row.workflow is not None:
        task = msgspec.structs.replace(task, workflow=_shown_workflow(row.workflow, task.workflow))
        if row.due == NEVER:
            eta = None
    return msgspec.structs.replace(
        task,
        eta=eta,
        status=row.status,
        attempts=row.attempts,
        crashes=row.crashes,
        releases=row.releases,
        token=row.token,
        owner=row.owner,
        started_at=started_at,
        cancel_requested=row.cancel_requested,
    )


def _shown_workflow(workflow: Workflow, given: TaskWorkflow | None) -> TaskWorkflow:
    return msgspec.structs.replace(
        given or TaskWorkflow(),
        needs=workflow.needs,
        holds=workflow.holds,
        on=workflow.on,
        members=workflow.members,
        size=workflow.size,
        failed=workflow.failed,
        is_open=workflow.is_open,
        has_returned=workflow.result is not None,
        follows=workflow.follows,
    )


def first_token(epoch: int) -> int:
    """The lowest token of an epoch; `seq` and the versions of schedules have the same floor."""
    return epoch << EPOCH_BITS


def next_token(row: Row, epoch: int) -> int:
    """The token of the next claim of the row, in the store's epoch."""
    token = row.token + 1
    return max(token, first_token(epoch)) if epoch else token


def claim(row: Row, owner: str, now: int, epoch: int = 0) -> None:
    """PENDING or RETRYING → RUNNING, with an owner and the next token of the store's epoch."""
    row.status = _RUNNING
    row.owner = owner
    row.token = next_token(row, epoch) if epoch else row.token + 1
    row.started_at = now
    row.parked = None


def is_current(row: Row, outcome: Outcome, owner: str) -> bool:
    """Whether the outcome belongs to the claim that holds the task now."""
    if row.token != outcome.token:
        return False
    if row.owner == owner:
        return True
    # The next run of an interval task may be moved by the owner that has just finished the last one.
    return (
        isinstance(outcome, Rescheduled)
        and row.repeats
        and row.owner is None
        and row.settled == outcome.token
    )


def was_recorded(row: Row, outcome: Outcome) -> bool:
    """Whether this outcome's claim was already ended by an outcome: a repeat after a lost reply."""
    return row.owner is None and row.token == outcome.token == row.settled


def settle(row: Row, outcome: Outcome, now: int) -> Settled:
    """Apply the outcome of a run. The caller has checked `is_current`."""
    if row.cancel_requested and _would_run_again(row, outcome):
        return Settled(finish=finish_cancelled(row, now, "cancelled while running", by_owner=True))
    match outcome:
        case Succeeded():
            return _settle_success(row, outcome)
        case Retried():
            failure = _effect_of_failure(row)
            if row.status is _RUNNING:
                _add_attempt(row, outcome.error, "failed", now)
                row.attempts += 1
                row.status = _RETRYING
            if outcome.eta is not None:
                _release(row, to_micros(outcome.eta))
            return Settled(effect=failure, reason=outcome.error.error_type)
        case Rescheduled():
            if row.status is _RUNNING:
                row.status = _PENDING
            _release(row, to_micros(outcome.eta))
            return Settled()
        case Failed():
            failure = _effect_of_failure(row)
            is_crash = outcome.reason == "crashed"
            how = "crashed" if is_crash else "failed"
            finish = _finish_failed(
                row, outcome.error, outcome.reason, how, now, by_owner=True, hook=outcome.hook
            )
            if outcome.next_eta is not None and row.repeats:
                # The history stays, until a run succeeds: there is no dead letter to look at.
                _next_occurrence(row, outcome.next_eta)
                reason = outcome.error.error_type
                return Settled(failure=finish, effect=failure, reason=reason)
            return Settled(
                finish=finish,
                effect="neither" if is_crash else failure,
                reason=outcome.error.error_type,
            )
        case Snoozed():
            row.status = _PENDING
            _release(row, to_micros(outcome.eta))
            return Settled()
        case Released():
            row.status = _PENDING
            row.releases += outcome.unknown_function
            if outcome.eta is None:
                fair, turn = row.fair, row.order[1]
                _release(row, row.due, visible=row.visible)
                if fair is not None:
                    keep_place(row, fair, turn)
            else:
                _release(row, to_micros(outcome.eta))
            return Settled()
        case Suspended():
            row.status = _PENDING
            _suspend(row, outcome)
            return Settled()
        case Cancelled():
            return Settled(finish=finish_cancelled(row, now, outcome.reason, by_owner=True))
        case _:
            assert_never(outcome)


def _would_run_again(row: Row, outcome: Outcome) -> bool:
    if isinstance(outcome, Failed):
        return outcome.next_eta is not None and row.repeats
    return isinstance(outcome, Retried | Snoozed | Released | Rescheduled | Suspended)


def _effect_of_failure(row: Row) -> Effect:
    """A failed run counts once, also for its breakers, even if its failure is recorded twice."""
    return "failure" if row.status is _RUNNING else "neither"


def _suspend(row: Row, outcome: Suspended) -> None:
    fair, turn = row.fair, row.order[1]
    begin_wait(row, outcome.on, outcome.enough)
    _release(row, NEVER if outcome.until is None else to_micros(outcome.until))
    keep_place(row, fair, turn)


def _settle_success(row: Row, outcome: Succeeded) -> Settled:
    workflow = row.workflow
    if workflow is not None and workflow.members and not row.cancel_requested:
        # It has ended when its children have. A task that repeats has none.
        row.status = _PENDING
        row.workflow = msgspec.structs.replace(workflow, result=outcome.encoded)
        _release(row, NEVER)
        return Settled(effect="success")
    if outcome.next_eta is None or row.cancel_requested:
        row.settled = row.token
        finish = Finish(_SUCCESS, outcome.result, None, outcome.encoded)
        return Settled(finish, None, "success")
    row.history = ()
    _next_occurrence(row, outcome.next_eta)
    return Settled(result=outcome.encoded, effect="success")


def _next_occurrence(row: Row, eta: datetime) -> None:
    """The next run of a repeating task, with no failures."""
    row.status = _PENDING
    row.attempts = 0
    row.crashes = 0
    row.occurrence = row.token
    _release(row, to_micros(eta))


def _release(row: Row, due: int, *, visible: int | None = None) -> None:
    row.settled = row.token
    row.owner = None
    row.parked = None
    come_to_wait(row, due)
    row.visible = due if visible is None else visible


def _ended_at(row: Row, error: TaskError, now: int) -> int:
    """When the run ended that failed so. Its outcome may have waited before it was recorded."""
    if error.timestamp is None or error.timestamp.tzinfo is None:
        return now
    # The worker's clock may differ a little from the store's.
    return min(max(to_micros(error.timestamp), row.started_at), now)


def _add_attempt(row: Row, error: TaskError, outcome: str, now: int) -> None:
    attempt = Attempt(
        number=row.runs + 1,
        token=row.token,
        owner=row.owner,
        started_at=from_micros(row.started_at) if row.started_at else None,
        finished_at=from_micros(_ended_at(row, error, now)),
        outcome=outcome,
        error=error,
    )
    history = (*row.history, attempt)
    if len(history) > MAX_HISTORY:
        history = (history[0], *history[-MAX_HISTORY + 1 :])
    row.history = history


def _finish_failed(
    row: Row,
    error: TaskError,
    reason: str,
    outcome: str,
    now: int,
    *,
    by_owner: bool,
    hook: str | None = "",
) -> Finish:
    # A failure that was already charged by mark_failed(will_retry=True) is not charged again.
    if row.status is _RUNNING:
        _add_attempt(row, error, outcome, now)
        if outcome == "crashed":
            row.crashes += 1
        else:
            row.attempts += 1
    row.settled = row.token if by_owner else 0
    ended_at = from_micros(_ended_at(row, error, now))
    result = TaskResult(
        task_id=row.id,
        status=_FAILED,
        error=error,
        attempts=row.runs,
        started_at=from_micros(row.started_at) if row.started_at else None,
        finished_at=ended_at,
        reason=reason,
    )
    letter = StoredLetter(
        task_id=row.id,
        func_path=row.func_path,
        failure_reason=reason,
        attempt_count=row.runs,
        first_failure=row.history[0].finished_at,
        last_failure=ended_at,
        error_details=error.traceback or f"{error.error_type}: {error.message}",
        queue=row.queue,
        own_type=row.task_type,
    )
    return Finish(status=_FAILED, result=result, dead=letter, hook=hook)


def finish_cancelled(row: Row, now: int, reason: str, *, by_owner: bool = False) -> Finish:
    """Any live state → CANCELLED."""
    row.settled = row.token if by_owner else 0
    ran = row.status is _RUNNING
    result = TaskResult(
        task_id=row.id,
        status=_CANCELLED,
        attempts=row.runs + ran,
        started_at=from_micros(row.started_at) if ran else None,
        finished_at=from_micros(now),
        reason=reason,
    )
    return Finish(status=_CANCELLED, result=result)


def is_expired(row: Row, now: int) -> bool:
    """Whether the task's `expires` has passed before it was claimed; one that is resumed does not expire."""
    if row.expires is None or row.expires > now:
        return False
    return row.workflow is None or not row.workflow.has_run


def runs_at_most_once(row: Row) -> bool:
    """Whether the task may not run again once a run has begun and its end is unknown."""
    return row.max_crashes is not None and row.max_crashes <= 1


def finish_crashed(row: Row, now: int, reason: str = "") -> Finish:
    """RUNNING → FAILED: the end of the run is unknown, and the task does not run again."""
    error = _worker_lost(row, now, reason)
    return _finish_failed(row, error, "crashed", "crashed", now, by_owner=False)


def _worker_lost(row: Row, now: int, reason: str) -> TaskError:
    cause = f": {reason}" if reason else ""
    return TaskError(
        f"worker {row.owner} was lost while it ran the task{cause}",
        error_type=LOST,
        timestamp=from_micros(now),
    )


def give_back(
    rows: Sequence[Row], now: int, max_crashes: int, reason: str = "", *, epoch: int = 0
) -> list[tuple[Row, Settled]]:
    """Take all tasks from a dead owner; `rows` is everything it held.

    When it held a suspect, only the suspects are charged with the crash, and those that may not run
    again after one. `max_crashes` is for tasks that have no maximum of their own. Claims from before the
    store's `epoch` are charged nothing: the store may have forgotten how they ended.
    """
    forgotten = [row for row in rows if row.token < first_token(epoch)]
    rows = [row for row in rows if row.token >= first_token(epoch)]
    running = [row for row in rows if row.status is _RUNNING]
    charged = {row.id for row in running if row.is_suspect} or {row.id for row in running}
    return [
        *((row, _give_back_forgotten(row, now)) for row in forgotten),
        *((row, _give_back_one(row, row.id in charged, now, max_crashes, reason)) for row in rows),
    ]


def _give_back_forgotten(row: Row, now: int) -> Settled:
    if row.status is _RUNNING and runs_at_most_once(row) and not row.cancel_requested:
        error = _worker_lost(row, now, WENT_BACK)
        finish = _finish_failed(row, error, WENT_BACK, "crashed", now, by_owner=False)
        return Settled(finish=finish)
    return _give_back_one(row, is_charged=False, now=now, max_crashes=0, reason="")


def _give_back_one(row: Row, is_charged: bool, now: int, max_crashes: int, reason: str) -> Settled:
    if row.cancel_requested:
        return Settled(finish=finish_cancelled(row, now, "cancelled while running"))
    if row.status is _RUNNING and (is_charged or runs_at_most_once(row)):
        most = max_crashes if row.max_crashes is None else row.max_crashes
        if row.crashes + 1 >= most:
            # No effect on breakers: a dead worker says nothing about what its task depends on.
            return Settled(finish=finish_crashed(row, now, reason))
        _add_attempt(row, _worker_lost(row, now, reason), "crashed", now)
        row.crashes += 1
        row.status = _RETRYING
    elif row.status is _RUNNING:
        row.status = _PENDING
    turn = row.order[1]
    if row.status is _RETRYING:
        row.due = now
        turn = now - row.lead if row.fair is None else turn
    keep_place(row, row.fair, turn)
    row.visible = 0
    row.owner = None
    row.settled = 0
    return Settled()


def change_waiting(row: Row, task: Task, body: bytes, now: int, *, due: bool) -> None:
    """Give a waiting row the queue and the priority of `task`, and with `due` also its eta.

    `task` is the same task, and `body` encodes it. Without an eta it is due now.
    """
    line, turn = (row.queue, row.priority), row.order[1]
    was_due = row.visible <= now
    row.queue, row.priority, row.body = task.queue, task.priority, body
    if row.fair is not None or row.lead or task.ageing is not None:
        turn += row.lead
        _choose_order(row, task)
        turn -= row.lead
    if due and row.workflow is not None and is_waiting(row):
        # Its eta when it is released; nothing else makes it claimable.
        eta = None if task.eta is None else to_micros(task.eta)
        row.workflow = msgspec.structs.replace(row.workflow, eta=eta)
    elif due:
        come_to_wait(row, now if task.eta is None else to_micros(task.eta))
        row.visible = 0 if task.eta is None else row.due
    elif row.fair is None:
        row.turn = turn
    was_in_line = row.fair is not None and turn >= 0 and was_due
    if was_in_line and row.visible <= now and line == (row.queue, row.priority):
        place(row, turn)


def forget_failures(row: Row, now: int) -> None:
    """Have a waiting row begin from its first run, because it gets another call."""
    if row.status is not _PENDING:
        row.waits_since = now
    row.status = _PENDING
    row.attempts = row.crashes = row.releases = 0
    row.occurrence = row.token
    row.history = ()


def retry_dead(row: Row, now: int, *, edited: Row | None = None, from_start: bool = False) -> None:
    """Set a dead letter's row back to PENDING, without failures; the token keeps counting up.

    `edited` is the row of the same task with another call: what a body and its row must agree in is as there.
    """
    if edited is not None or from_start:
        row.occurrence = row.token
    row.status = _PENDING
    row.owner = None
    row.attempts = row.crashes = row.releases = row.settled = row.started_at = 0
    row.cancel_requested = False
    row.history = ()
    row.parked = None
    if edited is not None:
        row.body, row.priority, row.expires = edited.body, edited.priority, edited.expires
        row.fair, row.lead = edited.fair, edited.lead
        row.gates, row.max_crashes = edited.gates, edited.max_crashes
        row.unique, row.unique_aliases = edited.unique, edited.unique_aliases
    come_to_wait(row, now)
    row.visible = 0


def finished_row(row: Row, finish: Finish, result: bytes, now: int) -> FinishedRow:
    """The record of a row that has ended."""
    row.status = finish.status
    row.owner = None
    return FinishedRow(row=row, finished_at=now, expires_at=now + row.result_ttl, result=result)


def retrying_result(row: Row) -> TaskResult | None:
    """The result of a live task whose newest run failed and that will run again; else None."""
    if row.status is not _RETRYING or not row.history:
        return None
    newest = row.history[-1]
    return TaskResult(
        task_id=row.id,
        status=_RETRYING,
        error=newest.error,
        attempts=row.runs,
        started_at=newest.started_at,
        finished_at=newest.finished_at,
    )
