"""Where settings come from: environment variables, and the files of the project."""

from __future__ import annotations

import os
import re
import shlex
import stat
import tomllib
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote

from omniq._deprecation import callers_level
from omniq.errors import SettingsError
from omniq.settings.places import PlaceRules
from omniq.settings.rules import RULES, SECRET, refuse_unknown, variable_of
from omniq.text.masking import mask_url

CONFIG_VARIABLE = "OMNIQ_CONFIG"
FILES = ("pyproject.toml", "omniq.toml")
_OTHER_VARIABLES = re.compile(
    r"OMNIQ_(CONFIG|FAILPOINTS|CHROMIUM|WORKER_COMMAND|TEST_.*|DASHBOARD_(OPERATOR|VIEWER)"
    # Kubernetes sets these for a service whose name begins with "omniq".
    r"|(.+_)?(PORT(_.*)?|SERVICE_(HOST|PORT.*)))"
)
"""The variables that are not settings."""
_RELATIVE_URL = re.compile(
    r"(sqlite|file):(?:(?<=sqlite:)///)?([^/?].*)", re.IGNORECASE | re.DOTALL
)


def read_environment() -> dict[str, object]:
    """The settings that environment variables have."""
    found = {name: os.environ.get(variable_of(name), "") for name in RULES}
    for name, text in found.items():
        if RULES[name] is SECRET and variable_of(name) in os.environ and not text.strip():
            raise SettingsError(
                f"{variable_of(name)} is set and empty, which would turn the keys off; set it to a "
                f"secret, or run unset {variable_of(name)}"
            )
    _warn_of_unknown_variables()
    return {name: text for name, text in found.items() if text.strip()}


def project_folder() -> Path:
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
        if any(os.path.lexists(folder / name) for name in (*FILES, ".git")):
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


def read_files(folder: Path) -> list[tuple[str, Mapping[str, object]]]:
    """The settings of each file, with its name."""
    named = os.environ.get(CONFIG_VARIABLE, "")
    if named.strip():
        return [(named, _read_file(Path(named), is_named=True))]
    paths = [folder / name for name in FILES]
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
    refuse_unknown(table, source)
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
    return mask_url(url) != url or any(RULES[name] is SECRET for name in table)


def _warn_of_unknown_variables() -> None:
    known = {variable_of(name) for name in RULES}
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
