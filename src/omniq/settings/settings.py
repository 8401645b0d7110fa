"""`Settings`: all values, validated once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from omniq.errors import SettingsError
from omniq.retry import policy_text
from omniq.settings.rules import (
    RULES,
    QueueSettings,
    RetryPolicy,
    check_value,
    masked_value,
    queues_data,
    refuse_unknown,
    shown_value,
    variable_of,
)
from omniq.settings.sources import (
    CONFIG_VARIABLE,
    FILES,
    project_folder,
    read_environment,
    read_files,
)

DEFAULT_FOLDER = ".omniq"

_DEFAULT = "default"
_ARGUMENT = "argument"


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
    for single queues: `{"mail": {"retry": [10, 30, 60]}, "web": {"max_retries": 5}}`;
    `ageing` there is for all tasks of the queue without `fair_key`.

    `lifespan` is the dotted path of an async context manager that each worker process enters before it
    claims a task, within `start_timeout`; `middleware` are paths of functions around each run.

    A process of `omniq worker`, or a child process for `executor="process"`, is replaced by a new one when it has run
    `max_tasks_per_child` tasks, or uses more than `max_memory_per_child` bytes. A child process can use no more than
    `child_memory_limit` bytes of address space, `child_process_limit` processes and threads of its user, and
    `child_file_limit` open files.

    A task whose function no live worker has waits for one. With an `unknown_function_timeout` it is a
    dead letter once it has been due for so long.

    `max_pending` bounds the tasks that wait. `schema`, `poll_only` and `pool_size` are for PostgreSQL,
    `prefix` for Redis. All of them may also be in the URL, which then decides. A blocking call that
    takes longer than `call_timeout` raises `CallTimeout`. A call to a PostgreSQL or Redis server that does not answer
    tries to reach it for `reconnect_timeout`, and raises `StorageError` then.

    A worker is stalled if its last heartbeat is older than `stalled_after`. A task is stuck if its run
    exceeds its timeout by `stuck_grace` or, without a timeout, lasts for `endless_after`.

    `app_version` names the version of the application, such as a commit: its first start is a mark in the history
    of runs. Without it, a digest of the modules with the tasks is used.

    Of the output of a task, `ctx.log` and `ctx.stream`, the newest `max_output_chunks` and
    `max_output_bytes` are kept.

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
    max_output_chunks: int = 10_000
    max_output_bytes: int = 1024 * 1024
    errors: str | None = None
    lifespan: str | None = None
    middleware: tuple[str, ...] = ()
    start_timeout: float = 60.0
    max_tasks_per_child: int | None = None
    max_memory_per_child: int | None = None
    child_memory_limit: int | None = None
    child_process_limit: int | None = None
    child_file_limit: int | None = None
    unknown_function_timeout: float | None = None
    root_opens_any_store: bool = False
    require_key: bool = False
    max_pending: int | None = None
    schema: str = "omniq"
    poll_only: bool = False
    pool_size: int = 10
    prefix: str = "omniq"
    call_timeout: float | None = None
    reconnect_timeout: float | None = None
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
            checked = check_value(name, value, _ARGUMENT)
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
        refuse_unknown(arguments, _ARGUMENT)
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None or _accepts_none(name)
        }
        folder = project_folder()
        layers: list[tuple[str, Mapping[str, object]]] = [
            *read_files(folder),
            ("environment", read_environment()),
            (_ARGUMENT, given),
        ]
        values: dict[str, Any] = {}
        sources = dict.fromkeys(RULES, _DEFAULT)
        for source, layer in layers:
            for name, value in layer.items():
                values[name] = check_value(name, value, source)
                sources[name] = variable_of(name) if source == "environment" else source
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

    def ageing_of(self, queue: str) -> float | None:
        """The ageing of tasks of this queue that name none, in seconds.

        >>> Settings(queues={"mail": {"ageing": 60}}).ageing_of("mail")
        60.0
        """
        return next((each.ageing for each in self._queues if each.queue == queue), None)

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
        values = {name: getattr(self, name) for name in RULES}
        values["base_dir"] = str(self.base_dir)
        values["retry"] = None if self._retry is None else policy_text(self._retry)
        values["queues"] = queues_data(self._queues) or None
        return values

    def overridden(self, source: str, texts: Mapping[str, str]) -> Settings:
        """These settings with some of them given as text elsewhere, such as a URL's options."""
        refuse_unknown(texts, source)
        values = {name: getattr(self, name) for name in RULES}
        for name, text in texts.items():
            try:
                values[name] = RULES[name].from_text(text)
            except ValueError:
                values[name] = text
            values[name] = check_value(name, values[name], source)
        settings = Settings(**values)
        sources = {**self.sources, **dict.fromkeys(texts, source)}
        object.__setattr__(settings, "sources", sources)
        return settings

    def modules_folder(self) -> Path | None:
        """The folder of the project's file that names `modules`, which lie there; None without one."""
        file = Path(self.sources["modules"])
        if file.name not in FILES or os.environ.get(CONFIG_VARIABLE, "").strip():
            return None
        return file.absolute().parent

    def shown(self) -> dict[str, str]:
        """Each setting as text that is safe to show: passwords and keys are hidden."""
        values = self.as_data()
        values["queues"] = json.dumps(values["queues"]) if values["queues"] else None
        return {
            name: _plain_text(value if value is None else masked_value(name, value))
            for name, value in values.items()
        }

    def __repr__(self) -> str:
        shown = (f"{name}={shown_value(name, getattr(self, name))}" for name in RULES)
        return f"Settings({', '.join(shown)})"


def _defaults() -> dict[str, object]:
    return {setting.name: setting.default for setting in fields(Settings) if setting.init}


def _accepts_none(name: str) -> bool:
    return name == "default_timeout"


def _plain_text(value: object) -> str:
    """As a settings file or a variable has it.

    >>> _plain_text(None), _plain_text(True), _plain_text(1.5), _plain_text(("a", "b.c"))
    ('none', 'true', '1.5', 'a,b.c')
    """
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
