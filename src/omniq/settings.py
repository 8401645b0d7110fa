"""Every setting of omniq: arguments, environment and TOML, merged once and validated once.

`Settings(...)` uses its arguments only. `Settings.load(...)` also reads the environment and files;
the first of these that has a value wins:

    an argument, OMNIQ_<NAME>, omniq.toml, [tool.omniq] in pyproject.toml, the default

Both files are those of the project's folder: the current folder, or the first above it that has one
of them or `.git`. Paths in them are relative to that folder, as is the default `base_dir`. A file
that OMNIQ_CONFIG names takes the place of both. A file that was found and not named is refused if
another user could have written it: settings choose what a worker runs. An empty environment variable
counts as unset, but that of a key is an error: it would turn off what the key is for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from urllib.parse import quote

from omniq._deprecation import callers_level
from omniq.errors import SettingsError
from omniq.masking import mask_url
from omniq.places import PlaceRules
from omniq.retry import ExponentialBackoff, LinearBackoff, policy_from_text, policy_text

CONFIG_VARIABLE = "OMNIQ_CONFIG"

DEFAULT_FOLDER = ".omniq"

_DEFAULT = "default"
_ARGUMENT = "argument"
_FILES = ("pyproject.toml", "omniq.toml")
_OTHER_VARIABLES = re.compile(
    r"OMNIQ_(CONFIG|FAILPOINTS|CHROMIUM|WORKER_COMMAND|TEST_.*|DASHBOARD_(OPERATOR|VIEWER)"
    # Kubernetes sets these for a service whose name begins with "omniq".
    r"|(.+_)?(PORT(_.*)?|SERVICE_(HOST|PORT.*)))"
)
"""The variables that are not settings."""
_LONGEST = 100 * 366 * 86_400
_MAX_DELAYS = 1_000
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
_URL = re.compile(r"[a-z][a-z0-9+.-]*:.*", re.IGNORECASE | re.DOTALL)
_RELATIVE_URL = re.compile(
    r"(sqlite|file):(?:(?<=sqlite:)///)?([^/?].*)", re.IGNORECASE | re.DOTALL
)
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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Settings:
    """The settings of a queue, a worker and the command line. Durations are seconds.

    `modules` are those whose functions `omniq worker` runs when it is given none.
    `default_timeout` is the timeout of tasks without one; None, written "none" in the environment
    and in TOML, means no timeout. `durability` says what an acknowledged task survives: "power" a
    power cut, "os" only the end of the process. `errors` is the dotted path of the `ErrorRules`
    that workers apply. With a `signing_key` every record is signed, with an `encryption_key`
    encrypted; `old_keys`, separated by spaces, are for reading older records. With `require_key`,
    settings without a key are an error.

    `log_level` and `log_format` are for the log of `omniq worker`. A failed run is logged with its
    traceback, unless `log_tracebacks` is off, and with the text of the exception, unless
    `log_error_messages` is off: that text may contain arguments of the task.

    `retry` is the delays before retries, for tasks that name none: `[10, 30, 60]`, whose length is also
    the number of retries, or "linear(step=5)" or "exponential(base=1, cap=600)". `queues` has the same
    for single queues: `{"mail": {"retry": [10, 30, 60]}, "web": {"max_retries": 5}}`.

    `lifespan` is the dotted path of an async context manager that each worker process enters before it
    claims a task, within `start_timeout`; `middleware` are paths of functions around each run.

    A task whose function no live worker has waits for one. With an `unknown_function_timeout` it is a
    dead letter once it has been due for so long.

    `max_pending` bounds the tasks that wait. `schema`, `poll_only` and `pool_size` are for PostgreSQL,
    `prefix` for Redis. All of them may also be in the URL, which then decides. A blocking call that
    takes longer than `call_timeout` raises `CallTimeout`.

    A worker is stalled if its last heartbeat is older than `stalled_after`. A task is stuck if its run
    exceeds its timeout by `stuck_grace` or, without a timeout, lasts for `endless_after`.

    `app_version` names the version of the application, such as a commit: its first start is a mark in the history
    of runs. Without it, a digest of the modules with the tasks is used.

    Root opens only stores of root, unless `root_opens_any_store`: the owner of a file or folder
    chooses what its workers run.
    """

    url: str | None = None
    concurrency: int = 10
    modules: tuple[str, ...] = ()
    poll_interval: float = 1.0
    lease: float = 30.0
    default_timeout: float | None = 300.0
    default_max_retries: int = 3
    max_crashes: int = 3
    base_retry_delay: float = 1.0
    retry: RetryPolicy | Sequence[float] | str | None = None
    queues: Mapping[str, Mapping[str, object]] | tuple[QueueSettings, ...] | None = None
    result_ttl: float = 86_400.0
    serializer: Literal["msgspec", "cloudpickle"] = "msgspec"
    signing_key: str | None = None
    encryption_key: str | None = None
    old_keys: str | None = None
    durability: Literal["power", "os"] = "power"
    log_level: str = "INFO"
    log_format: Literal["text", "json"] = "text"
    log_tracebacks: bool = True
    log_error_messages: bool = True
    base_dir: Path = Path(DEFAULT_FOLDER)
    shutdown_timeout: float = 30.0
    max_payload: int = 1024 * 1024
    errors: str | None = None
    lifespan: str | None = None
    middleware: tuple[str, ...] = ()
    start_timeout: float = 60.0
    unknown_function_timeout: float | None = None
    root_opens_any_store: bool = False
    require_key: bool = False
    max_pending: int | None = None
    schema: str = "omniq"
    poll_only: bool = False
    pool_size: int = 10
    prefix: str = "omniq"
    call_timeout: float | None = None
    stalled_after: float = 10.0
    stuck_grace: float = 10.0
    endless_after: float = 3_600.0
    app_version: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict, init=False, compare=False)
    """Where each value came from: "default", "argument", the variable, or the file.

    An argument of the constructor that equals the default counts as the default; `load` tells
    the two apart.
    """

    def __post_init__(self) -> None:
        sources = {}
        for name, default in _defaults().items():
            value = getattr(self, name)
            checked = _checked(name, value, _ARGUMENT)
            object.__setattr__(self, name, checked)
            sources[name] = _DEFAULT if checked == default else _ARGUMENT
        object.__setattr__(self, "sources", sources)
        self._check_retries()
        has_key = self.signing_key is not None or self.encryption_key is not None
        if self.old_keys is not None and not has_key:
            raise SettingsError(
                "old_keys without a key: records would be neither signed nor encrypted; set "
                "OMNIQ_SIGNING_KEY or OMNIQ_ENCRYPTION_KEY too, or remove OMNIQ_OLD_KEYS"
            )
        if self.require_key and not has_key:
            raise SettingsError(
                "require_key: there is no key; set OMNIQ_SIGNING_KEY or OMNIQ_ENCRYPTION_KEY to the "
                "same secret for every process"
            )
        if self.serializer == "cloudpickle" and not has_key:
            raise SettingsError(
                "serializer='cloudpickle': needs a signing_key, since unpickling runs code; "
                "set OMNIQ_SIGNING_KEY to the same secret for every process"
            )

    @classmethod
    def load(cls, **arguments: object) -> Settings:
        """The settings of this process: arguments, environment, files, defaults, in that order.

        An argument of None counts as not given, except for `default_timeout`, where None is a
        value. Raises `SettingsError` naming the source of a value that is wrong.
        """
        _refuse_unknown(arguments, _ARGUMENT)
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None or _accepts_none(name)
        }
        folder = _project_folder()
        layers: list[tuple[str, Mapping[str, object]]] = [
            *_read_files(folder),
            ("environment", _read_environment()),
            (_ARGUMENT, given),
        ]
        values: dict[str, Any] = {}
        sources = dict.fromkeys(_RULES, _DEFAULT)
        for source, layer in layers:
            for name, value in layer.items():
                values[name] = _checked(name, value, source)
                sources[name] = _variable(name) if source == "environment" else source
        if sources["base_dir"] == _DEFAULT:
            values["base_dir"] = folder / DEFAULT_FOLDER
        settings = cls(**values)
        object.__setattr__(settings, "sources", sources)
        settings._check_retries()
        return settings

    def _check_retries(self) -> None:
        most, source = self.default_max_retries, self.sources["default_max_retries"]
        if isinstance(self.retry, tuple) and source != _DEFAULT and most != len(self.retry):
            raise SettingsError(
                f"default_max_retries={most} and a retry list of {len(self.retry)} delays contradict "
                "each other: remove default_max_retries, the length of the list is the number of retries"
            )

    def retries_of(self, queue: str) -> tuple[int, RetryPolicy | None]:
        """The number of retries and their delays, for tasks of this queue that name none.

        >>> Settings(retry=[1, 2], queues={"mail": {"max_retries": 7}}).retries_of("mail")
        (7, (1.0, 2.0))
        """
        levels = [each for each in self._queues if each.queue == queue]
        levels.append(QueueSettings("", self._retry, self.default_max_retries))
        if isinstance(self._retry, tuple):
            levels[-1] = QueueSettings("", self._retry, len(self._retry))
        policy = next((each.retry for each in levels if each.retry is not None), None)
        most = next(each.max_retries for each in levels if each.max_retries is not None)
        return most, policy

    @property
    def queue_names(self) -> tuple[str, ...]:
        """The queues that have settings."""
        return tuple(each.queue for each in self._queues)

    @property
    def _retry(self) -> RetryPolicy | None:
        return cast("RetryPolicy | None", self.retry)

    @property
    def _queues(self) -> tuple[QueueSettings, ...]:
        return cast("tuple[QueueSettings, ...]", self.queues or ())

    def as_data(self) -> dict[str, Any]:
        """All settings as plain data, from which the constructor makes equal ones."""
        values = {name: getattr(self, name) for name in _RULES}
        values["base_dir"] = str(self.base_dir)
        values["retry"] = None if self._retry is None else policy_text(self._retry)
        values["queues"] = _queues_data(self._queues) or None
        return values

    def overridden(self, source: str, texts: Mapping[str, str]) -> Settings:
        """These settings with some of them given as text elsewhere, such as a URL's options."""
        _refuse_unknown(texts, source)
        values = {name: getattr(self, name) for name in _RULES}
        for name, text in texts.items():
            try:
                values[name] = _RULES[name].from_text(text)
            except ValueError:
                values[name] = text
            values[name] = _checked(name, values[name], source)
        settings = Settings(**values)
        sources = {**self.sources, **dict.fromkeys(texts, source)}
        object.__setattr__(settings, "sources", sources)
        return settings

    def modules_folder(self) -> Path | None:
        """The folder of the project's file that names `modules`, which lie there; None without one."""
        file = Path(self.sources["modules"])
        if file.name not in _FILES or os.environ.get(CONFIG_VARIABLE, "").strip():
            return None
        return file.absolute().parent

    def shown(self) -> dict[str, str]:
        """Each setting as text that is safe to show: passwords and keys are hidden."""
        values = self.as_data()
        values["queues"] = json.dumps(values["queues"]) if values["queues"] else None
        return {
            name: _plain_text(value if value is None else _masked(name, value))
            for name, value in values.items()
        }

    def __repr__(self) -> str:
        shown = (f"{name}={_shown(name, getattr(self, name))}" for name in _RULES)
        return f"Settings({', '.join(shown)})"


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
        "expected a table for each queue with retry or max_retries, such as "
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
    if not isinstance(table, Mapping) or not table.keys() <= {"retry", "max_retries"}:
        raise ValueError("unknown settings")
    retry = _Retry().normalize(table.get("retry"))
    most = table.get("max_retries")
    if most is not None and not _Count(0).accepts(most):
        raise ValueError("not a number of retries")
    if isinstance(retry, tuple):
        if most not in (None, len(retry)):
            raise ValueError("two numbers of retries")
        most = len(retry)
    return QueueSettings(name, retry, most)


def _queues_data(queues: tuple[QueueSettings, ...]) -> dict[str, dict[str, object]]:
    """As a settings file has it; without the length of a list, which is known."""
    found: dict[str, dict[str, object]] = {}
    for each in queues:
        found[each.queue] = {} if each.retry is None else {"retry": policy_text(each.retry)}
        if each.max_retries is not None and not isinstance(each.retry, tuple):
            found[each.queue]["max_retries"] = each.max_retries
    return found


_SECRET = _Text("expected a secret, not blanks", re.compile(r"(?=.*\S).+", re.DOTALL))

_RULES: dict[str, _Rule] = {
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
    "signing_key": _SECRET,
    "encryption_key": _SECRET,
    "old_keys": _SECRET,
    "durability": _Choice(("power", "os")),
    "log_level": _Choice(_LOG_LEVELS),
    "log_format": _Choice(("text", "json")),
    "log_tracebacks": _Switch(),
    "log_error_messages": _Switch(),
    "base_dir": _Folder(),
    "shutdown_timeout": _Seconds(zero=True),
    "max_payload": _Count(1),
    "errors": _Text("expected the path of ErrorRules, such as app.tasks.RULES", _DOTTED),
    "lifespan": _Text("expected the path of a lifespan, such as app.tasks.lifespan", _DOTTED),
    "middleware": _Modules('expected paths of middleware, such as ["app.mw.sentry"]', _DOTTED),
    "start_timeout": _Seconds(),
    "unknown_function_timeout": _Seconds(zero=True, optional=True),
    "root_opens_any_store": _Switch(),
    "require_key": _Switch(),
    "max_pending": _Count(1, optional=True),
    "schema": _Text("expected the name of a schema", _WORD, is_optional=False),
    "poll_only": _Switch(),
    "pool_size": _Count(1),
    "prefix": _Text("expected 1 to 100 characters, no space or brace", _PREFIX, is_optional=False),
    "call_timeout": _Seconds(optional=True),
    "stalled_after": _Seconds(),
    "stuck_grace": _Seconds(zero=True),
    "endless_after": _Seconds(),
    "app_version": _Text("expected a version or a commit, up to 64 letters", _VERSION),
}


def _defaults() -> dict[str, object]:
    return {setting.name: setting.default for setting in fields(Settings) if setting.init}


def _accepts_none(name: str) -> bool:
    return name == "default_timeout"


def _checked(name: str, value: object, source: str) -> object:
    rule = _RULES[name]
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
            where = f"{_variable(name)}={_masked(name, value)}"
        case "argument":
            where = f"{name}={_shown(name, value)}"
        case _:
            where = f"{source}: {name} = {_shown(name, value)}"
    return SettingsError(f"{where}: {_RULES[name].expected}")


def _shown(name: str, value: object) -> str:
    return repr(value if value is None else _masked(name, value))


def _masked(name: str, value: object) -> object:
    if _RULES[name] is _SECRET:
        return "***"
    return mask_url(str(value)) if name == "url" else value


def _plain_text(value: object) -> str:
    """As a settings file or a variable has it.

    >>> _plain_text(None), _plain_text(True), _plain_text(1.5), _plain_text(("a", "b.c"))
    ('none', 'true', '1.5', 'a,b.c')
    """
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _variable(name: str) -> str:
    return f"OMNIQ_{name.upper()}"


def _read_environment() -> dict[str, object]:
    found = {name: os.environ.get(_variable(name), "") for name in _RULES}
    for name, text in found.items():
        if _RULES[name] is _SECRET and _variable(name) in os.environ and not text.strip():
            raise SettingsError(
                f"{_variable(name)} is set and empty, which would turn the keys off; set it to a "
                f"secret, or run unset {_variable(name)}"
            )
    _warn_of_unknown_variables()
    return {name: text for name, text in found.items() if text.strip()}


def _project_folder() -> Path:
    """The current folder, or the first above it with settings or `.git`; relative if it is the first.

    Folders above the home folder are not looked at, nor are those of another user or that others
    may write to: a file that another user put there would be refused, in every folder below it.
    """
    try:
        current = Path.cwd()
    except OSError:  # It was deleted, or may not be read.
        return Path()
    home = Path(os.path.expanduser("~"))
    for folder in (current, *current.parents):
        if folder != current and not _is_own(folder):
            break
        if any(os.path.lexists(folder / name) for name in (*_FILES, ".git")):
            return Path() if folder == current else folder
        if folder == home:
            break
    return Path()


def _is_own(folder: Path) -> bool:
    try:
        facts = folder.stat()
    except OSError:
        return False
    return facts.st_uid == os.geteuid() and not facts.st_mode & stat.S_IWOTH


def _read_files(folder: Path) -> list[tuple[str, Mapping[str, object]]]:
    """The settings of each file, with its name."""
    named = os.environ.get(CONFIG_VARIABLE, "")
    if named.strip():
        return [(named, _read_file(Path(named), is_named=True))]
    paths = [folder / name for name in _FILES]
    return [(str(path), _relative_to(folder, _read_file(path, is_named=False))) for path in paths]


def _relative_to(folder: Path, table: Mapping[str, object]) -> Mapping[str, object]:
    """The settings of a file in this folder, with paths that are right in the current folder."""
    base_dir, url = table.get("base_dir"), table.get("url")
    changed: dict[str, object] = {}
    if isinstance(base_dir, str):
        changed["base_dir"] = str(folder / base_dir)
    if isinstance(url, str) and folder != Path():
        changed["url"] = _absolute_url(url, folder)
    return {**table, **changed}


def _absolute_url(url: str, folder: Path) -> str:
    """The URL of a file or folder; if its path is relative, with this folder in front of it.

    >>> _absolute_url("sqlite:///tasks.db", Path("/srv/app"))
    'sqlite:////srv/app/tasks.db'
    """
    found = _RELATIVE_URL.fullmatch(url)
    if found is None:
        return url
    start = "file://" if found[1].lower() == "file" else "sqlite:///"
    return f"{start}{quote(str(folder))}/{found[2]}"


def _read_file(path: Path, *, is_named: bool) -> Mapping[str, object]:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise SettingsError(f"{path} cannot be read: it is not a file")
            table = _own_table(path, tomllib.loads(file.read().decode()))
    except FileNotFoundError:
        if is_named:
            raise SettingsError(f"{CONFIG_VARIABLE}={path}: there is no such file") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if table and not is_named:
        _check_place(path, facts)
    source = f"{path}, [tool.omniq]" if path.name == "pyproject.toml" else str(path)
    _refuse_unknown(table, source)
    if facts.st_mode & 0o044 and _holds_secrets(table):
        warnings.warn(
            f"{path.absolute()}: holds a secret, and other users of this machine may read it; "
            f"run chmod go-r {shlex.quote(str(path))}",
            stacklevel=callers_level(),
        )
    return table


def _open_at_once(path: str, flags: int) -> int:
    # A pipe of that name would never be ready.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _own_table(path: Path, found: dict[str, Any]) -> Mapping[str, object]:
    """The part of a file that has settings of omniq."""
    if path.name != "pyproject.toml":
        return found
    tools = found.get("tool", {})
    table = tools.get("omniq", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: tool.omniq must be a table")
    return table


def _check_place(path: Path, facts: os.stat_result) -> None:
    """Refuse a file of the current folder that another user could have written.

    The open file is asked, not its name: the name may lead to another file by now.
    """
    rules = PlaceRules(
        refusal=SettingsError,
        danger="choose what your workers run",
        mend=f", or use it nevertheless: {CONFIG_VARIABLE}={shlex.quote(str(path.absolute()))}",
    )
    rules.check(facts, path.absolute())
    rules.check_folder(path.absolute().parent)
    if path.is_symlink():
        rules.check_folder(path.resolve().parent)


def _holds_secrets(table: Mapping[str, object]) -> bool:
    url = str(table.get("url", ""))
    return mask_url(url) != url or any(_RULES[name] is _SECRET for name in table)


def _warn_of_unknown_variables() -> None:
    known = {_variable(name) for name in _RULES}
    for variable in os.environ:
        if not variable.startswith("OMNIQ_") or variable in known:
            continue
        if _OTHER_VARIABLES.fullmatch(variable):
            continue
        near = get_close_matches(variable, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see the reference of settings"
        warnings.warn(
            f"{variable} is not a setting of omniq and is ignored; {hint}",
            stacklevel=callers_level(),
        )


def _refuse_unknown(values: Mapping[str, object], source: str) -> None:
    for name in values:
        if name not in _RULES:
            near = get_close_matches(name, _RULES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(_RULES)}"
            raise SettingsError(f"{source}: there is no setting {name!r}; {hint}")
