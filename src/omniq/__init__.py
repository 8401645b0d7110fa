"""omniq: a task queue for Python; one engine over many stores."""

from __future__ import annotations

from loguru import logger

# A library does not talk unasked: `omniq.log.enable()` switches its log lines on.
logger.disable("omniq")
