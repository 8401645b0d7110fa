"""The values that each setting accepts, and how text is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, cast

from omniq.errors import SettingsError
from omniq.retry import ExponentialBackoff, LinearBackoff, policy_from_text, policy_text
from omniq.text.masking import mask_url

_LONGEST = 100 * 366 * 86_400
_MAX_DELAYS = 1_000
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
_URL = re.compile(r"[a-z][a-z0-9+.-]*:.*", re.IGNORECASE | re.DOTALL)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_WORD = re.compile(r"\S+")
_PREFIX = re.compile(r"[^{}\s]{1,100}")
_VERSION = re.compile(r"[A-Za-z0-9_.+-]{1,64}")

RetryPolicy = ExponentialBackoff | LinearBackoff | tuple[float, ...]
"""The delays before retries: a backoff, or a list of seconds."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of one queue, `[tool.omniq.queues.NAME]`. None: as for all queues."""

    queue: str
    retry: RetryPolicy | None = None
    max_retries: int | None = None
    ageing: float | None = None


class _Rule(Protocol):
    """The values that one setting accepts, how text is parsed, and the form that is stored."""

    @property
    def expected(self) -> str: ...

    def from_text(self, text: str) -> object: ...

    def accepts(self, value: object) -> bool: ...

    def normalize(self, value: Any) -> object: ...


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() == "none")


@dataclass(frozen=True, slots=True)
class _Seconds:
    """A duration: a number of seconds or a `timedelta`."""

    zero: bool = False
    optional: bool = False

    @property
    def expected(self) -> str:
        bound = "0 or more" if self.zero else "greater than 0"
        return f"expected a number of seconds, {bound}" + (', or "none"' if self.optional else "")

    def from_text(self, text: str) -> object:
        return text if self._is_none(text) else float(text)

    def accepts(self, value: object) -> bool:
        if self._is_none(value):
            return True
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # False for NaN, and safe for whole numbers that no float can hold.
        return 0 < value <= _LONGEST or (self.zero and value == 0)

    def normalize(self, value: Any) -> object:
        if self._is_none(value):
            return None
        return value.total_seconds() if isinstance(value, timedelta) else float(value)

    def _is_none(self, value: object) -> bool:
        return self.optional and _is_none(value)


@dataclass(frozen=True, slots=True)
class _Count:
    """A whole number."""

    low: int
    optional: bool = False

    @property
    def expected(self) -> str:
        or_none = ', or "none"' if self.optional else ""
        return f"expected a whole number, {self.low} or more{or_none}"

    def from_text(self, text: str) -> object:
        return text if self._is_none(text) else int(text)

    def accepts(self, value: object) -> bool:
        return self._is_none(value) or (type(value) is int and self.low <= value < 2**63)

    def normalize(self, value: Any) -> object:
        return None if self._is_none(value) else value

    def _is_none(self, value: object) -> bool:
        return self.optional and _is_none(value)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of a few words, in any case."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"expected one of {', '.join(self.words)}"

    def from_text(self, text: str) -> object:
        return text.strip()

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and self.normalize(value) is not None

    def normalize(self, value: Any) -> object:
        return next((word for word in self.words if word.lower() == value.lower()), None)


@dataclass(frozen=True, slots=True)
class _Switch:
    """True or false."""

    expected: str = "expected true or false"

    def from_text(self, text: str) -> object:
        words = {"true": True, "1": True, "false": False, "0": False}
        return words.get(text.strip().lower(), text)

    def accepts(self, value: object) -> bool:
        return isinstance(value, bool)

    def normalize(self, value: Any) -> object:
        return value


@dataclass(frozen=True, slots=True)
class _Text:
    """Text that is not empty, or, if `is_optional`, None for "none given"."""

    expected: str
    pattern: re.Pattern[str]
    is_optional: bool = True

    def from_text(self, text: str) -> object:
        return text

    def accepts(self, value: object) -> bool:
        if value is None:
            return self.is_optional
        return isinstance(value, str) and bool(self.pattern.fullmatch(value))

    def normalize(self, value: Any) -> object:
        return value


@dataclass(frozen=True, slots=True)
class _Folder:
    """A path. Relative ones are relative to the current folder."""

    expected: str = "expected the path of a folder"

    def from_text(self, text: str) -> object:
        return text

    def accepts(self, value: object) -> bool:
        return isinstance(value, Path) or (isinstance(value, str) and bool(value.strip()))

    def normalize(self, value: Any) -> object:
        return Path(value)


@dataclass(frozen=True, slots=True)
class _Modules:
    """Names of modules: a list, or text with commas between them."""

    expected: str = 'expected names of modules, such as ["app.tasks"]'
    pattern: re.Pattern[str] = _MODULE

    def from_text(self, text: str) -> object:
        return [name.strip() for name in text.split(",")]

    def accepts(self, value: object) -> bool:
        return isinstance(value, list | tuple) and all(
            isinstance(name, str) and self.pattern.fullmatch(name) for name in value
        )

    def normalize(self, value: Any) -> object:
        return tuple(value)


@dataclass(frozen=True, slots=True)
class _Retry:
    """The delays before retries."""

    expected: str = (
        'expected delays such as [10, 30, 60], or text such as "10s, 30s, 1m", "linear(step=5)" or '
        '"exponential(base=1, cap=600)"'
    )

    def from_text(self, text: str) -> object:
        return policy_from_text(text)

    def accepts(self, value: object) -> bool:
        try:
            self.normalize(value)
        except ValueError:
            return False
        return True

    def normalize(self, value: Any) -> RetryPolicy | None:
        if value is None or isinstance(value, ExponentialBackoff | LinearBackoff):
            return value
        if isinstance(value, str):
            value = policy_from_text(value)
        if isinstance(value, ExponentialBackoff | LinearBackoff):
            return value
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= _MAX_DELAYS:
            raise ValueError("not a list")
        delays = [policy_from_text(each) if isinstance(each, str) else (each,) for each in value]
        if not all(isinstance(each, tuple) and len(each) == 1 for each in delays):
            raise ValueError("not a list of delays")
        seconds = [each[0] for each in delays if isinstance(each, tuple)]
        if not all(_Seconds(zero=True).accepts(each) for each in seconds):
            raise ValueError("not a delay")
        return tuple(float(_Seconds().normalize(each)) for each in seconds)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Queues:
    """The settings of single queues: a table of tables, in the environment as JSON."""

    expected: str = (
        "expected a table for each queue with retry, max_retries or ageing, such as "
        '{"mail": {"retry": [10, 30, 60]}}; the length of a list is the number of retries'
    )

    def from_text(self, text: str) -> object:
        return json.loads(text)

    def accepts(self, value: object) -> bool:
        try:
            self.normalize(value)
        except ValueError:
            return False
        return True

    def normalize(self, value: Any) -> tuple[QueueSettings, ...] | None:
        if value is None or value == () or value == {}:
            return None
        if isinstance(value, tuple) and all(isinstance(each, QueueSettings) for each in value):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("not a table")
        return tuple(_queue_settings(name, table) for name, table in sorted(value.items()))


def _queue_settings(name: object, table: object) -> QueueSettings:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("not the name of a queue")
    if not isinstance(table, Mapping) or not table.keys() <= {"retry", "max_retries", "ageing"}:
        raise ValueError("unknown settings")
    retry = _Retry().normalize(table.get("retry"))
    most = table.get("max_retries")
    if most is not None and not _Count(0).accepts(most):
        raise ValueError("not a number of retries")
    if isinstance(retry, tuple):
        if most not in (None, len(retry)):
            raise ValueError("two numbers of retries")
        most = len(retry)
    ageing = table.get("ageing")
    if ageing is None:
        return QueueSettings(name, retry, most)
    if not _Seconds().accepts(ageing):
        raise ValueError("not a span of time")
    return QueueSettings(name, retry, most, cast(float, _Seconds().normalize(ageing)))


def queues_data(queues: tuple[QueueSettings, ...]) -> dict[str, dict[str, object]]:
    """As a settings file has it; without the length of a list, which is known."""
    found: dict[str, dict[str, object]] = {}
    for each in queues:
        found[each.queue] = {} if each.retry is None else {"retry": policy_text(each.retry)}
        if each.max_retries is not None and not isinstance(each.retry, tuple):
            found[each.queue]["max_retries"] = each.max_retries
        if each.ageing is not None:
            found[each.queue]["ageing"] = each.ageing
    return found


SECRET = _Text("expected a secret, not blanks", re.compile(r"(?=.*\S).+", re.DOTALL))

RULES: dict[str, _Rule] = {
    "url": _Text("expected a URL such as sqlite:///tasks.db", _URL),
    "concurrency": _Count(1),
    "modules": _Modules(),
    "poll_interval": _Seconds(),
    "lease": _Seconds(),
    "default_timeout": _Seconds(optional=True),
    "default_max_retries": _Count(0),
    "max_crashes": _Count(1),
    "base_retry_delay": _Seconds(zero=True),
    "retry": _Retry(),
    "queues": _Queues(),
    "result_ttl": _Seconds(zero=True),
    "serializer": _Choice(("msgspec", "cloudpickle")),
    "signing_key": SECRET,
    "encryption_key": SECRET,
    "old_keys": SECRET,
    "durability": _Choice(("power", "os")),
    "log_level": _Choice(_LOG_LEVELS),
    "log_format": _Choice(("text", "json")),
    "log_tracebacks": _Switch(),
    "log_error_messages": _Switch(),
    "base_dir": _Folder(),
    "shutdown_timeout": _Seconds(zero=True),
    "max_payload": _Count(1),
    "max_output_chunks": _Count(1),
    "max_output_bytes": _Count(65_536),
    "errors": _Text("expected the path of ErrorRules, such as app.tasks.RULES", _DOTTED),
    "lifespan": _Text("expected the path of a lifespan, such as app.tasks.lifespan", _DOTTED),
    "middleware": _Modules('expected paths of middleware, such as ["app.mw.sentry"]', _DOTTED),
    "start_timeout": _Seconds(),
    "max_tasks_per_child": _Count(1, optional=True),
    "max_memory_per_child": _Count(1, optional=True),
    "child_memory_limit": _Count(64 * 1024 * 1024, optional=True),
    "child_process_limit": _Count(1, optional=True),
    "child_file_limit": _Count(32, optional=True),
    "unknown_function_timeout": _Seconds(zero=True, optional=True),
    "root_opens_any_store": _Switch(),
    "require_key": _Switch(),
    "max_pending": _Count(1, optional=True),
    "schema": _Text("expected the name of a schema", _WORD, is_optional=False),
    "poll_only": _Switch(),
    "pool_size": _Count(1),
    "prefix": _Text("expected 1 to 100 characters, no space or brace", _PREFIX, is_optional=False),
    "call_timeout": _Seconds(optional=True),
    "reconnect_timeout": _Seconds(optional=True),
    "stalled_after": _Seconds(),
    "stuck_grace": _Seconds(zero=True),
    "endless_after": _Seconds(),
    "app_version": _Text("expected a version or a commit, up to 64 letters", _VERSION),
}


def check_value(name: str, value: object, source: str) -> object:
    """The value in the form that is stored; raises `SettingsError` that names the source."""
    rule = RULES[name]
    try:
        parsed = rule.from_text(str(value)) if source == "environment" else value
    except ValueError:
        raise _bad_value(name, value, source) from None
    if not rule.accepts(parsed):
        raise _bad_value(name, value, source)
    return rule.normalize(parsed)


def _bad_value(name: str, value: object, source: str) -> SettingsError:
    match source:
        case "environment":
            where = f"{variable_of(name)}={masked_value(name, value)}"
        case "argument":
            where = f"{name}={shown_value(name, value)}"
        case _:
            where = f"{source}: {name} = {shown_value(name, value)}"
    return SettingsError(f"{where}: {RULES[name].expected}")


def shown_value(name: str, value: object) -> str:
    """The value as an error shows it, without secrets."""
    return repr(value if value is None else masked_value(name, value))


def masked_value(name: str, value: object) -> object:
    """The value, without a key or the password of a URL."""
    if RULES[name] is SECRET:
        return "***"
    return mask_url(str(value)) if name == "url" else value


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"OMNIQ_{name.upper()}"


def refuse_unknown(values: Mapping[str, object], source: str) -> None:
    """Raise `SettingsError` for a name that no setting has."""
    for name in values:
        if name not in RULES:
            near = get_close_matches(name, RULES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(RULES)}"
            raise SettingsError(f"{source}: there is no setting {name!r}; {hint}")
