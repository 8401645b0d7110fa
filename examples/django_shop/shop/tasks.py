"""The shop's tasks: Django's `@task`, and `@omniq.task` for options that Django lacks."""

from __future__ import annotations

from typing import Any

import django

import omniq

if django.VERSION >= (6,):
    from django.tasks import task
else:
    from django_tasks import task


@task(queue_name="parcels", priority=5)
@omniq.task(max_retries=5, timeout=30)
def send_parcel(order: int) -> str:
    return f"parcel for order {order}"


@task(takes_context=True)
async def count(context: Any, order: int) -> int:
    return order + int(context.attempt)
