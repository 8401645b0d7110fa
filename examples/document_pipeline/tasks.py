"""Two tasks: process a document by its id, and run a command on a document.

Neither handles errors itself: `RULES` says which errors are retried.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.request import Request, urlopen

from omniq import ErrorRules, LinearBackoff, TaskContext, task

TIMEOUT = 0.5
"""Seconds to wait for a response of the service."""

RULES = ErrorRules(http=True)
"""5xx, 408 and 429 are transient and are retried, after `Retry-After` if the response has it; 401,
403, 404 and similar ones are permanent."""


@task(queue="documents", errors=RULES, retry=LinearBackoff(step=0.2))
def process_document(ctx: TaskContext, service: str, document_id: str) -> dict[str, Any]:
    """Five steps; the last two are not critical."""

    def call(action: str) -> dict[str, Any]:
        return post(f"{service}/{document_id}/{action}", key=f"{ctx.task_id}/{action}")

    updated = ctx.step("update_document_content", call, "content")
    ctx.step("add_search_terms", call, "terms")
    ctx.step("move_document", call, "move")
    ctx.step("remove_markers", call, "markers", critical=False)
    ctx.step("post_comment", call, "comments", critical=False)
    return updated


@task(queue="commands", errors=RULES, retry=LinearBackoff(step=0.2))
async def run_command(
    ctx: TaskContext, service: str, document: dict[str, Any], command: str, guidance: str
) -> str:
    """Run a command on a document that is an argument; async, so that many tasks can wait at once."""

    async def call(action: str) -> dict[str, Any]:
        url, key = f"{service}/{document['id']}/{action}", f"{ctx.task_id}/{action}"
        return await asyncio.to_thread(post, url, key)

    response = await ctx.step("run_command", call, command)
    await ctx.step("store_answer", call, "content")
    return f"{response['action']} of {document['title']!r}, {guidance}"


def post(url: str, key: str) -> dict[str, Any]:
    """Call the service. By the key it distinguishes a repeated request from a new one."""
    request = Request(url, data=b"{}", method="POST", headers={"Idempotency-Key": key})
    with urlopen(request, timeout=TIMEOUT) as response:
        content: dict[str, Any] = json.load(response)
    return content


def process_id(document_id: str) -> str:
    """The id of the document's task: enqueueing a second one raises `DuplicateTask`."""
    return f"process-{document_id}"


def command_id(command: str, document_id: str) -> str:
    return f"cmd-{command}-{document_id}"
