"""Processes documents in five steps with a service that fails on purpose; no step takes effect twice.

    python examples/document_pipeline/main.py

Prints each failed attempt, its step and the steps completed before it, then the outcome of the task.
After the service is repaired, the dead letter is retried and continues at the failed step. All files
are temporary.
"""

from __future__ import annotations

import asyncio
import tempfile

from service import HANGS, DocumentService
from tasks import command_id, process_document, process_id, run_command

from omniq import AsyncTaskHandle, AsyncTaskQueue, TaskResult, TaskStatus

DOCUMENTS = ("report", "minutes", "contract", "memo", "letter")
TIMEOUT = 30


def plan_failures(service: DocumentService) -> None:
    service.fail("minutes", "terms", 503, Retry_After="1")
    service.fail("contract", "move", 404, times=9)
    service.fail("memo", "content", HANGS)
    service.fail("letter", "comments", 500)
    service.fail("thesis", "summarize", 429, Retry_After="1")


async def enqueue(queue: AsyncTaskQueue, service: DocumentService) -> list[AsyncTaskHandle[object]]:
    handles: list[AsyncTaskHandle[object]] = []
    for document in DOCUMENTS:
        named = queue.options(task_id=process_id(document), task_type="process")
        handles.append(await named.enqueue(process_document, service.url, document))
    thesis = {"id": "thesis", "title": "On Queues"}
    # Commands are tasks of one function: their type tells logs, metrics and dead letters which.
    named = queue.options(task_id=command_id("summarize", "thesis"), task_type="summarize")
    handles.append(await named.enqueue(run_command, service.url, thesis, "summarize", "briefly"))
    return handles


async def show(queue: AsyncTaskQueue, task_id: str) -> None:
    """Print each failed attempt of the task, and its outcome."""
    result = await queue.get_result(task_id, timeout=TIMEOUT)
    assert result is not None
    print(task_id)
    last = None
    for attempt in await queue.history(task_id):
        error = attempt.error
        assert error is not None
        print(
            f"   attempt {attempt.number}  {error.category:<9}  {error.error_type}: {error.message}"
        )
        print(f"              in {error.failed_step}; {error.recovery_hint}")
        last = attempt.finished_at
    waited = ""
    if last is not None and result.started_at is not None and result.started_at > last:
        waited = f", {(result.started_at - last).total_seconds():.1f} s after the last failure"
    print(f"   {outcome(result)}{waited}")


def outcome(result: TaskResult) -> str:
    if result.status is TaskStatus.FAILED:
        return f"dead letter ({result.reason}) after {result.attempts} attempt"
    warnings = "".join(f"\n              but {warning}" for warning in result.warnings)
    return f"success on attempt {result.attempts}{warnings}"


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder, DocumentService() as service:
        plan_failures(service)
        async with AsyncTaskQueue(f"sqlite:///{folder}/tasks.db") as queue:
            handles = await enqueue(queue, service)
            async with queue.worker(concurrency=10):
                for handle in handles:
                    await show(queue, handle.id)

                print("\nthe service is repaired, and the dead letter is retried")
                service.heal()
                await queue.dead.retry(process_id("contract"))
                await show(queue, process_id("contract"))
        twice = [call for call, times in service.done.items() if times > 1]
        print(f"\n{sum(service.done.values())} calls took effect, {len(twice)} of them twice")


if __name__ == "__main__":
    asyncio.run(main())
