"""Tasks that log."""

from __future__ import annotations

import asyncio
import logging

from loguru import logger

from omniq import task

log = logging.getLogger(__name__)


@task
async def in_loop() -> None:
    await asyncio.sleep(0)
    log.info("hello")
    logger.info("hello")


@task
def in_thread() -> None:
    log.info("hello")
    logger.info("hello")


@task
async def with_own_id() -> None:
    log.info("hello", extra={"task_id": "mine"})
    logger.bind(task_id="mine").info("hello")
