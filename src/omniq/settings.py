"""Every setting of omniq: arguments, environment and TOML, merged once and validated once.

`Settings(...)` uses its arguments only. `Settings.load(...)` also reads the environment and files;
the first of these that has a value wins:

    an argument, OMNIQ_<NAME>, omniq.toml, [tool.omniq] in pyproject.toml, the default

Both files are those of the current folder. An empty environment variable counts as unset.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol

from omniq.errors import SettingsError

_DEFAULT = "default"
_ARGUMENT = "argument"
_LONGEST = 100 * 366 * 86_400
_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
_URL = re.compile(r"[a-z][a-z0-9+.-]*:.*", re.IGNORECASE | re.DOTALL)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_USER_PASSWORD = re.compile(r"(://[^:/?#@]*):.*@", re.DOTALL)
_SECRET_OPTION = re.compile(r"([?&][^=&]*(?:passw|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Settings:
    """The settings of a queue, a worker and the command line. Durations are seconds.

    `default_timeout` is the timeout of tasks without one; None, written "none" in the environment
    and in TOML, means no timeout. `durability` says what an acknowledged task survives: "power" a
    power cut, "os" only the end of the process. `errors` is the dotted path of the `ErrorRules`
    that workers apply. With a `signing_key` every record is signed, with an `encryption_key`
    encrypted; `old_keys`, separated by spaces, are for reading older records.

    A task whose function no live worker has waits for one. With an `unknown_function_timeout` it is a
    dead letter once it has been due for so long.
    """

    url: str | None = None
    concurrency: int = 1
    poll_interval: float = 1.0
    lease: float = 30.0
    default_timeout: float | None = 300.0
    default_max_retries: int = 3
    max_crashes: int = 3
    base_retry_delay: float = 1.0
    result_ttl: float = 86_400.0
    serializer: Literal["msgspec", "cloudpickle"] = "msgspec"
    signing_key: str | None = None
    encryption_key: str | None = None
    old_keys: str | None = None
    durability: Literal["power", "os"] = "power"
    log_level: str = "INFO"
    base_dir: Path = Path(".omniq")
    shutdown_timeout: float = 30.0
    max_payload: int = 1024 * 1024
    errors: str | None = None
    unknown_function_timeout: float | None = None
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
        if self.serializer == "cloudpickle" and not (self.signing_key or self.encryption_key):
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
        layers: list[tuple[str, Mapping[str, object]]] = [
            ("pyproject.toml", _read_pyproject(Path("pyproject.toml"))),
            ("omniq.toml", _read_toml(Path("omniq.toml"))),
            ("environment", _read_environment()),
            (_ARGUMENT, given),
        ]
        values: dict[str, Any] = {}
        sources = dict.fromkeys(_RULES, _DEFAULT)
        for source, layer in layers:
            for name, value in layer.items():
                values[name] = _checked(name, value, source)
                sources[name] = _variable(name) if source == "environment" else source
        settings = cls(**values)
        object.__setattr__(settings, "sources", sources)
        return settings

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

    def shown(self) -> dict[str, str]:
        """Each setting as text that is safe to show: passwords and keys are hidden."""
        values = {name: getattr(self, name) for name in _RULES}
        return {
            name: "none" if value is None else str(_masked(name, value))
            for name, value in values.items()
        }

    def __repr__(self) -> str:
        shown = (f"{name}={_shown(name, getattr(self, name))}" for name in _RULES)
        return f"Settings({', '.join(shown)})"


def mask_url(url: str) -> str:
    """The URL with every password replaced, for logs, messages and screens.

    >>> mask_url("postgresql://me:secret@db/app?sslpassword=other")
    'postgresql://me:***@db/app?sslpassword=***'
    """
    # Greedy up to the last @, so that a password that contains an unquoted @ is hidden too.
    return _SECRET_OPTION.sub(r"\1***", _USER_PASSWORD.sub(r"\1:***@", url))


class _Rule(Protocol):
    """The values that one setting accepts, how text is parsed, and the form that is stored."""

    @property
    def expected(self) -> str: ...

    def from_text(self, text: str) -> object: ...

    def accepts(self, value: object) -> bool: ...

    def normalize(self, value: Any) -> object: ...


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
        if not self.optional:
            return False
        return value is None or (isinstance(value, str) and value.strip().lower() == "none")


@dataclass(frozen=True, slots=True)
class _Count:
    """A whole number."""

    low: int

    @property
    def expected(self) -> str:
        return f"expected a whole number, {self.low} or more"

    def from_text(self, text: str) -> object:
        return int(text)

    def accepts(self, value: object) -> bool:
        return type(value) is int and self.low <= value < 2**63

    def normalize(self, value: Any) -> object:
        return value


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
class _Text:
    """Text that is not empty, or None for "none given"."""

    expected: str
    pattern: re.Pattern[str]

    def from_text(self, text: str) -> object:
        return text

    def accepts(self, value: object) -> bool:
        return value is None or (isinstance(value, str) and bool(self.pattern.fullmatch(value)))

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


_SECRET = _Text("expected text that is not empty", re.compile(r".+", re.DOTALL))

_RULES: dict[str, _Rule] = {
    "url": _Text("expected a URL such as sqlite:///tasks.db", _URL),
    "concurrency": _Count(1),
    "poll_interval": _Seconds(),
    "lease": _Seconds(),
    "default_timeout": _Seconds(optional=True),
    "default_max_retries": _Count(0),
    "max_crashes": _Count(1),
    "base_retry_delay": _Seconds(zero=True),
    "result_ttl": _Seconds(zero=True),
    "serializer": _Choice(("msgspec", "cloudpickle")),
    "signing_key": _SECRET,
    "encryption_key": _SECRET,
    "old_keys": _SECRET,
    "durability": _Choice(("power", "os")),
    "log_level": _Choice(_LOG_LEVELS),
    "base_dir": _Folder(),
    "shutdown_timeout": _Seconds(zero=True),
    "max_payload": _Count(1),
    "errors": _Text("expected the path of ErrorRules, such as app.tasks.RULES", _DOTTED),
    "unknown_function_timeout": _Seconds(zero=True, optional=True),
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


def _variable(name: str) -> str:
    return f"OMNIQ_{name.upper()}"


def _read_environment() -> dict[str, object]:
    found = {name: os.environ.get(_variable(name), "") for name in _RULES}
    return {name: text for name, text in found.items() if text.strip()}


def _read_pyproject(path: Path) -> Mapping[str, object]:
    tools = _parse_toml(path).get("tool", {})
    table = tools.get("omniq", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        raise SettingsError(f"{path.name}: tool.omniq must be a table")
    _refuse_unknown(table, f"{path.name}, [tool.omniq]")
    return table


def _read_toml(path: Path) -> Mapping[str, object]:
    table = _parse_toml(path)
    _refuse_unknown(table, path.name)
    return table


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        is_ours = path.name == "omniq.toml" or "omniq" in table.get("tool", {})
        if is_ours and path.stat().st_mode & stat.S_IWOTH:
            warnings.warn(
                f"{path.absolute()}: other users of this machine may change these settings; "
                f"run chmod o-w {path}",
                stacklevel=5,
            )
        return table
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path.name} cannot be read: {error}") from error


def _refuse_unknown(values: Mapping[str, object], source: str) -> None:
    for name in values:
        if name not in _RULES:
            near = get_close_matches(name, _RULES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(_RULES)}"
            raise SettingsError(f"{source}: there is no setting {name!r}; {hint}")
