"""The actions on workers, queues, functions, limits and breakers."""

from __future__ import annotations

from omniq.dashboard.action_requests import (
    ActionResult,
    BreakerName,
    FunctionName,
    HoldLimit,
    LimitKey,
    PauseFunction,
    PauseQueue,
    QueueName,
    SetLimit,
    SetSlots,
    WorkerId,
)
from omniq.dashboard.app_state import AppState
from omniq.errors import InvalidValue
from omniq.operations.formatting import count_of
from omniq.tasks.durations import seconds_in

_UNNAMED = "; no task has this limit now"


async def close_breaker(state: AppState, request: BreakerName) -> ActionResult:
    if not await state.storage.close_breaker(request.name):
        raise InvalidValue(f"breaker {request.name}: no claimed task has named it")
    return ActionResult(message=f"Breaker {request.name} closed")


async def set_limit(state: AppState, request: SetLimit) -> ActionResult:
    limits = state.queue.limits
    is_known = await limits.set(request.key, max_running=request.max_running, rate=request.rate)
    return ActionResult(message=f"Limit {request.key} changed{'' if is_known else _UNNAMED}")


async def reset_limit(state: AppState, request: LimitKey) -> ActionResult:
    await state.queue.limits.reset(request.key)
    return ActionResult(message=f"Limit {request.key} reset to what its tasks say")


async def hold_limit(state: AppState, request: HoldLimit) -> ActionResult:
    until = seconds_in(request.span) if request.span else None
    is_known = await state.queue.limits.hold(request.key, reason=request.why, until=until)
    return ActionResult(message=f"Limit {request.key} admits no task{'' if is_known else _UNNAMED}")


async def release_limit(state: AppState, request: LimitKey) -> ActionResult:
    await state.queue.limits.release(request.key)
    return ActionResult(message=f"Limit {request.key} admits tasks again")


async def stop_worker(state: AppState, request: WorkerId) -> ActionResult:
    if not await state.storage.stop_worker(request.id):
        raise _no_live_worker(request.id)
    return ActionResult(message=f"Worker {request.id} stops at its next heartbeat")


async def restart_worker(state: AppState, request: WorkerId) -> ActionResult:
    if not await state.storage.stop_worker(request.id, restart=True):
        raise _no_live_worker(request.id)
    return ActionResult(message=f"Worker {request.id} restarts at its next heartbeat")


async def set_slots(state: AppState, request: SetSlots) -> ActionResult:
    if not await state.storage.set_slots(request.id, request.slots):
        raise _no_live_worker(request.id)
    slots = count_of(request.slots, "slot")
    return ActionResult(message=f"Worker {request.id} has {slots} from its next heartbeat on")


async def pause_queue(state: AppState, request: PauseQueue) -> ActionResult:
    until = seconds_in(request.span) if request.span else None
    await state.queue.queues.pause(request.queue, reason=request.why, until=until)
    return ActionResult(message=f"Queue {request.queue} paused")


async def resume_queue(state: AppState, request: QueueName) -> ActionResult:
    await state.storage.resume_queue(request.queue)
    return ActionResult(message=f"Queue {request.queue} resumed")


async def pause_function(state: AppState, request: PauseFunction) -> ActionResult:
    until = seconds_in(request.span) if request.span else None
    await state.queue.functions.pause(request.function, reason=request.why, until=until)
    return ActionResult(message=f"Function {request.function} paused")


async def resume_function(state: AppState, request: FunctionName) -> ActionResult:
    await state.queue.functions.resume(request.function)
    return ActionResult(message=f"Function {request.function} resumed")


async def pause_worker(state: AppState, request: WorkerId) -> ActionResult:
    if not await state.storage.pause_worker(request.id):
        raise _no_live_worker(request.id)
    message = f"Worker {request.id} paused: it finishes its running tasks and claims no new ones"
    return ActionResult(message=message)


async def resume_worker(state: AppState, request: WorkerId) -> ActionResult:
    if not await state.storage.resume_worker(request.id):
        raise _no_live_worker(request.id)
    return ActionResult(message=f"Worker {request.id} resumed")


def _no_live_worker(worker_id: str) -> InvalidValue:
    return InvalidValue(f"worker {worker_id}: no live worker has this id")
