"""Imports the modules of a worker; says in one line why one cannot be imported, and what to write."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from omniq.errors import OmniqError, SettingsError, UnguardedModule
from omniq.log.user_frames import where
from omniq.tasks.import_guard import importing
from omniq.worker.import_path import named_folder
from omniq.worker.process.task_modules import modules_with_tasks


def import_with_tasks(name: str) -> None:
    """Import a module, and those below it that mark tasks: nothing is imported later for a task.

    Raises `SettingsError`, which names the module that cannot be imported.
    """
    import_module(name)
    for found in modules_with_tasks(sys.modules[name]):
        import_module(found)


def loaded_below(names: Sequence[str]) -> list[ModuleType]:
    """The modules of these names, and those below them, as far as they are imported."""
    prefixes = tuple(f"{name}." for name in names)
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name in names or name.startswith(prefixes)
    ]


def import_module(name: str) -> None:
    """Import a module of the user; raises `SettingsError` with the reason in one line."""
    if name.startswith("."):
        # A path such as ./tasks.py; Python would take it for a relative import.
        raise _no_module(name)
    try:
        with importing(name):
            importlib.import_module(name)
    except UnguardedModule as error:
        raise SettingsError(f"{error}{_user_line(error)}") from error
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _cannot_import(name, error) from error
        raise _no_module(name) from error
    except (Exception, SystemExit) as error:
        # The top of a user's module is the user's code: it may raise anything.
        raise _cannot_import(name, error) from error


def _no_module(name: str) -> OmniqError:
    module, _, attribute = name.rpartition(".")
    if ":" in name:
        hint = f"omniq needs no app object; give only the module: {name.partition(':')[0]}"
    elif name.endswith(".py") or "/" in name:
        shown = name.removesuffix(".py").strip("./").replace("/", ".")
        hint = f"give the name of a module, such as {shown}"
    elif module in sys.modules and hasattr(sys.modules[module], attribute):
        hint = f"{attribute} is defined in the module {module}; give the module: {module}"
    else:
        hint = _where_it_is(name)
    return SettingsError(f"there is no module {name}; {hint}")


def _user_line(error: BaseException) -> str:
    """Where in the user's code the error was raised."""
    place = where("".join(traceback.format_exception(error)))
    return f" ({place})" if place else ""


def _where_it_is(name: str) -> str:
    here = named_folder() or Path.cwd()
    first = name.partition(".")[0]
    if (here / "src" / first).exists() or (here / "src" / f"{first}.py").exists():
        return f"it is in {here / 'src'}: install your project, or set PYTHONPATH=src"
    if near := get_close_matches(name, [path.stem for path in here.glob("*.py")], n=1):
        return f"did you mean {near[0]}?"
    return f"omniq looked in {here} and among the installed packages; start the worker in the folder of your code"


def _cannot_import(name: str, error: BaseException) -> OmniqError:
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}, line {error.lineno})"
        return SettingsError(f"module {name} cannot be imported: {error.msg}{place}")
    return SettingsError(f"module {name} cannot be imported: {error!r}{_user_line(error)}")
