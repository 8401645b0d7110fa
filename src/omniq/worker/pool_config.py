"""The options of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import msgspec

from omniq.errors import InvalidValue
from omniq.models import check_seconds
from omniq.tasks.error_rules import ErrorRules
from omniq.worker.lifespan import Lifespan
from omniq.worker.middleware import Middleware


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a pool, checked and complete."""

    concurrency: int
    poll_interval: float
    base_retry_delay: float
    queues: tuple[str, ...] | None
    lease: float
    allow: list[str] | None
    errors: ErrorRules | None
    lifespan: Lifespan | None
    middleware: tuple[Middleware, ...]
    max_leaked_threads: int
    loop_patience: float

    def __post_init__(self) -> None:
        """Raise `InvalidValue` for a time that cannot be."""
        check_seconds("poll_interval", self.poll_interval, above_zero=True, error=InvalidValue)
        check_seconds("base_retry_delay", self.base_retry_delay, error=InvalidValue)
        check_seconds("lease", self.lease, above_zero=True, error=InvalidValue)
        check_seconds("loop_patience", self.loop_patience, above_zero=True, error=InvalidValue)


_NAMES = PoolConfig.__struct_fields__


def refuse_unknown_options(call: str, given: Iterable[str]) -> None:
    """Raise `InvalidValue` for the first name that is no option of a pool."""
    for name in given:
        if name not in _NAMES:
            near = get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(_NAMES)}"
            raise InvalidValue(f"{call}: there is no option {name!r}; {hint}")
