"""Two kinds of work on documents: by the document's id, and by a command on a document.

Both are written as if nothing could go wrong. What can is said once, in `RULES`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.request import Request, urlopen

from omniq import ErrorRules, LinearBackoff, TaskContext, task

PATIENCE = 0.5
"""Seconds to wait for an answer of the service."""

RULES = ErrorRules(http=True)
"""5xx, 408 and 429 pass, and say how long that takes; 401, 403, 404 and their like do not."""


@task(queue="documents", errors=RULES, retry=LinearBackoff(step=0.2))
def process_document(ctx: TaskContext, service: str, document_id: str) -> dict[str, Any]:
    """Five steps, the last two of which the document can do without."""

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
    """A command on a document that comes along with it; async, so that many can wait at once."""

    async def call(action: str) -> dict[str, Any]:
        url, key = f"{service}/{document['id']}/{action}", f"{ctx.task_id}/{action}"
        return await asyncio.to_thread(post, url, key)

    answer = await ctx.step("run_command", call, command)
    await ctx.step("store_answer", call, "content")
    return f"{answer['action']} of {document['title']!r}, {guidance}"


def post(url: str, key: str) -> dict[str, Any]:
    """Have the service do something; the key tells it a repeat from a new request."""
    request = Request(url, data=b"{}", method="POST", headers={"Idempotency-Key": key})
    with urlopen(request, timeout=PATIENCE) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def process_id(document_id: str) -> str:
    """One task for each document at a time: a second one is a `DuplicateTask`."""
    return f"process-{document_id}"


def command_id(command: str, document_id: str) -> str:
    return f"cmd-{command}-{document_id}"
