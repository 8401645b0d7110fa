"""The `on_dead` hooks that one pool calls: for its dead letters, and those that lost workers have left.

A hook is recorded with its dead letter until it has ended (`storage/pending_hooks.py`), so it is called at
least once: twice if its worker is lost after the call and before that is recorded.
"""

from __future__ import annotations

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


class DeadHooks:
    """Calls the hooks, on the pool's event loop, and records that they have ended."""

    def __init__(self, storage: BaseStorage, functions: FunctionCache, hooks: FailureHooks) -> None:
        self._storage = storage
        self._functions = functions
        self._hooks = hooks
        self._calling: set[Claim] = set()
        self._ended: list[Claim] = []
        self._seen: set[Claim] = set()
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
        self._hooks.died(task, error, lambda has_ended: self._on_end(claim, has_ended))

    async def _on_end(self, claim: Claim, has_ended: bool) -> None:
        self._calling.discard(claim)
        if not has_ended:
            # The pool stops: another worker calls it again.
            return
        hit("hook.after")
        self._ended.append(claim)
        await self._record_ended()

    async def _record_ended(self) -> None:
        while self._ended:
            claim = self._ended[0]
            try:
                await self._storage.end_hook(*claim)
            except StorageError:
                # The next round tries again.
                return
            if claim in self._ended:
                self._ended.remove(claim)

    async def take_lost(self) -> None:
        """Call the hooks whose workers are lost, and those that no worker has yet, if the function is here."""
        await self._record_ended()
        page, self._after = await self._storage.pending_hooks(self._after, _PAGE)
        others = [hook for hook in page if not self._is_under_way(hook)]
        if not others:
            self._seen = set()
            return
        live = {worker.id for worker in await self._storage.workers()}
        seen: set[Claim] = set()
        for hook in others:
            claim = (hook.task_id, hook.token)
            is_mine = hook.owner == self._storage.owner
            if is_mine and claim not in self._seen:
                # Perhaps the reply that says so is still on its way.
                seen.add(claim)
            elif is_mine or hook.owner not in live:
                await self._take(hook)
        self._seen = seen

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
        task = await self._verified_task(hook)
        if task is not None and await self._storage.take_hook(hook):
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
