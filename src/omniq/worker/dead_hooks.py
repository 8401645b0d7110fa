"""The `on_dead` hooks that one pool calls: for its dead letters, and those that lost workers have left.

A hook is recorded with its dead letter until it has ended (`storage/pending_hooks.py`), so it is called at
least once: twice if its worker is lost after the call and before that is recorded. A hook that may be what
its workers die of is called alone among such hooks, and not for ever.
"""

from __future__ import annotations

from contextlib import suppress

from omniq.errors import OmniqError, StorageError
from omniq.failpoints import hit
from omniq.models import Task, TaskError
from omniq.outcomes import Failed
from omniq.signing import is_sealed
from omniq.storage.base import BaseStorage
from omniq.storage.claim_register import Claim
from omniq.storage.types import PendingHook
from omniq.tasks.functions import FunctionCache, options_of
from omniq.worker.failure_hooks import FailureHooks

_PAGE = 500
"""Pending hooks that one round looks at. The next round goes on behind them."""

_MOST_LOST = 5
"""The number of workers that may be lost while they call one hook; then it is not called again."""


class DeadHooks:
    """Calls the hooks, on the pool's event loop, and records that they have ended."""

    def __init__(self, storage: BaseStorage, functions: FunctionCache, hooks: FailureHooks) -> None:
        self._storage = storage
        self._functions = functions
        self._hooks = hooks
        self._calling: set[Claim] = set()
        self._suspect: Claim | None = None
        """A hook that is called here, and that two workers were lost with."""
        self._ended: set[Claim] = set()
        """Hooks whose end is not recorded yet."""
        self._seen: set[Claim] = set()
        """Those of this owner that the last round through all pages has seen, and that nothing here calls."""
        self._seen_now: set[Claim] = set()
        self._after = ""

    def may_have_hook(self, func_path: str) -> bool:
        """Whether the function has a hook, or cannot be looked at here. From any thread."""
        return self._has_hook(func_path) is not False

    def _has_hook(self, func_path: str) -> bool | None:
        """Whether the function has a hook; None if it is not here."""
        try:
            return options_of(self._functions.resolve(func_path)).on_dead is not None
        except OmniqError:
            # Not here, or a name that means two functions. Nothing may be raised: this is called in a step.
            return None

    def recorded_with(self, outcome: Failed, func_path: str) -> Failed:
        """The outcome with the hook that is to be recorded with it."""
        has_hook = self._has_hook(func_path)
        hook = None if has_hook is False else self._storage.owner if has_hook else ""
        if outcome.next_eta is not None or hook == outcome.hook:
            return outcome
        return Failed(outcome.task_id, outcome.token, outcome.error, outcome.reason, hook=hook)

    def died(self, task: Task, error: TaskError) -> None:
        """Call the hook of a task that is a dead letter now, and that this pool has to call."""
        claim = (task.id, task.token)
        if claim in self._calling:
            return
        self._calling.add(claim)
        hit("hook.before")
        if not self._hooks.died(task, error, lambda has_ended: self._on_end(claim, has_ended)):
            self._calling.discard(claim)

    async def _on_end(self, claim: Claim, has_ended: bool) -> None:
        self._calling.discard(claim)
        if not has_ended:
            # The pool stops: another worker calls it again.
            return
        hit("hook.after")
        self._ended.add(claim)
        # The next round tries again.
        with suppress(StorageError):
            await self._record_end(claim)

    async def _record_end(self, claim: Claim) -> None:
        await self._storage.end_hook(*claim)
        self._ended.discard(claim)

    async def take_lost(self) -> None:
        """Call the hooks whose workers are lost, and those that no worker has yet, if the function is here."""
        for claim in tuple(self._ended):
            await self._record_end(claim)
        page, self._after = await self._storage.pending_hooks(self._after, _PAGE)
        others = [hook for hook in page if not self._is_under_way(hook)]
        live = {worker.id for worker in await self._storage.workers()} if others else set()
        for hook in others:
            claim = (hook.task_id, hook.token)
            is_mine = hook.owner == self._storage.owner
            if is_mine and claim not in self._seen:
                # Perhaps the reply that says so is still on its way.
                self._seen_now.add(claim)
            elif is_mine or hook.owner not in live:
                await self._take(hook)
        if not self._after:
            self._seen, self._seen_now = self._seen_now, set()

    def _is_under_way(self, hook: PendingHook) -> bool:
        claim = (hook.task_id, hook.token)
        return claim in self._calling or claim in self._ended

    async def _take(self, hook: PendingHook) -> None:
        has_hook = self._has_hook(hook.func_path)
        if has_hook is None:
            return
        if not has_hook:
            await self._storage.end_hook(hook.task_id, hook.token)
            return
        claim = (hook.task_id, hook.token)
        if hook.lost and self._suspect in self._calling:
            # One of them may be what kills its workers. The others must not be lost with it.
            return
        task = await self._verified_task(hook)
        if task is None:
            return
        if hook.owner != self._storage.owner and hook.lost + 1 >= _MOST_LOST:
            await self._storage.end_hook(*claim)
            self._hooks.gave_up(task, hook.lost + 1)
        elif await self._storage.take_hook(hook):
            if hook.lost:
                self._suspect = claim
            self.died(task, hook.error)

    async def _verified_task(self, hook: PendingHook) -> Task | None:
        """The task of the dead letter; None if it or the letter cannot be verified here."""
        storage = self._storage
        task = await storage.get_dead_task(hook.task_id)
        if task is None:
            # A caller has retried or deleted it since. What is left behind is deleted by taking it.
            await storage.take_hook(hook)
            return None
        if not task.is_verified:
            return None
        if is_sealed(storage.serializer):
            letter = await storage.get_dead(hook.task_id)
            if letter is None or not letter.is_verified:
                return None
        return task
