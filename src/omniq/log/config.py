"""What the log of a process shows: its level, its format, and how much of an error."""

from __future__ import annotations

from typing import Literal

import msgspec

from omniq.settings import Settings

Format = Literal["text", "json"]


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a log. Child processes receive it from their parent.

    `tracebacks`: a failed run is written with its traceback. `error_messages`: with the text of its
    exception, which may contain what the task's author put into it.
    """

    level: str = "INFO"
    format: Format = "text"
    tracebacks: bool = True
    error_messages: bool = True

    @classmethod
    def of(cls, settings: Settings) -> LogConfig:
        """The log that the settings describe."""
        return cls(
            level=settings.log_level,
            format=settings.log_format,
            tracebacks=settings.log_tracebacks,
            error_messages=settings.log_error_messages,
        )
