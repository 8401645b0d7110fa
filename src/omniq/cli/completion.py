"""Completion in the shell: `omniq completion`, and what it offers while a user types.

The script of a shell calls `omniq` with the words of the line and the variable `_OMNIQ_COMPLETE`; each line
that it prints is a candidate, and after a tab what it means. Names are read from the storage that the
line or the settings name, a bounded number of them.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from omniq.cli.command import Argument, Command, Group, Option, Parameter

if TYPE_CHECKING:
    from omniq.storage import BaseStorage

_MAX_NAMES = 200
_TIMEOUT = 3.0

_SEPARATORS = {"zsh": ":", "fish": "\t"}
"""Between a candidate and its meaning, in the shells that show it."""

_HARMLESS = re.compile(r"[\w.:@%+,/-]+")

Candidate = tuple[str, str]
"""What may be typed, and what it means."""

_BASH = """\
_omniq_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(_OMNIQ_COMPLETE=bash "${COMP_WORDS[0]}" "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _omniq_completion omniq
"""

_ZSH = """\
#compdef omniq
_omniq_completion() {
    local -a found
    found=("${(@f)$(_OMNIQ_COMPLETE=zsh "${words[1]}" "${(@)words[2,$CURRENT]}" 2>/dev/null)}")
    [[ -n "$found" ]] && _describe -V omniq found || _files
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _omniq_completion "$@"; else compdef _omniq_completion omniq; fi
"""

_FISH = """\
function _omniq_completion
    set -l words (commandline -opc) (commandline -ct)
    env _OMNIQ_COMPLETE=fish $words 2>/dev/null
end
complete -c omniq -f -a '(_omniq_completion)'
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[
        str | None, Argument(metavar="bash|zsh|fish", help="The shell; default: that of SHELL.")
    ] = None,
) -> None:
    """Print the script that completes commands, options and names in your shell.

    For bash, put `eval "$(omniq completion bash)"` into ~/.bashrc; for zsh, the same with `zsh` into ~/.zshrc,
    after `compinit`; for fish, run `omniq completion fish > ~/.config/fish/completions/omniq.fish`. It completes
    commands, options, statuses, and from the storage the names of queues, schedules, breakers and
    functions, and ids of tasks and workers.
    """
    from omniq.errors import InvalidValue

    chosen = shell or os.path.basename(os.environ.get("SHELL", ""))
    if chosen not in _SCRIPTS:
        raise InvalidValue(f"shell {chosen}: expected one of {', '.join(_SCRIPTS)}")
    sys.stdout.write(_SCRIPTS[chosen])


def print_candidates(words: Sequence[str], shell: str) -> None:
    """Print what may stand in the place of the last word."""
    from omniq.cli.app import app
    from omniq.text.escaping import visible

    # A shell splits at the sign: `--status=fa` arrives as three words.
    joined = [word for word in words[:-1] if word != "="]
    typed = words[-1] if words and words[-1] != "=" else ""
    name, equals, value = typed.partition("=")
    if equals and name.startswith("--"):
        joined, typed, before = [*joined, name], value, "" if shell == "bash" else f"{name}="
    else:
        before = ""
    for text, help in candidates(app, joined, typed):
        if not text.startswith(typed):
            continue
        shown = before + text
        meaning = visible(help) if shell in _SEPARATORS else ""
        if shell == "zsh":
            shown = shown.replace(":", "\\:")
        sys.stdout.write(f"{shown}{_SEPARATORS[shell]}{meaning}\n" if meaning else f"{shown}\n")


def candidates(group: Group, words: Sequence[str], typed: str) -> Iterable[Candidate]:
    """What may follow these words; those that do not begin with what is typed may be among them."""
    command: Command | Group = group
    rest = list(words)
    while rest and isinstance(command, Group):
        found = command.get(rest[0])
        if found is None:
            break
        command = found
        rest.pop(0)
    if isinstance(command, Group):
        names = [*command.helps.items()]
        listing = command.get("list") if command.lists_by_default else None
        if not isinstance(listing, Command) or not (rest or typed.startswith("-")):
            return names if not rest else []
        command = listing
    return _of_command(command, rest, typed)


def _of_command(command: Command, words: Sequence[str], typed: str) -> Iterable[Candidate]:
    if words and (option := command.option(words[-1])) is not None and option.kind is not bool:
        return _values(option, words)
    if typed.startswith("-"):
        options = ((_long_name(each), each.shape.help) for each in command.options)
        return [*options, ("--help", "Show this help.")]
    placed = _placed(command, words)
    arguments = command.arguments
    if not arguments or (placed >= len(arguments) and not arguments[-1].is_list):
        return []
    return _values(arguments[min(placed, len(arguments) - 1)], words)


def _long_name(option: Parameter) -> str:
    assert isinstance(option.shape, Option)
    return max(option.shape.names, key=len)


def _placed(command: Command, words: Sequence[str]) -> int:
    """How many of the words are arguments."""
    count, rest = 0, iter(words)
    for word in rest:
        option = command.option(word)
        if option is not None and option.kind is not bool:
            next(rest, None)
        elif not word.startswith("-"):
            count += 1
    return count


def _values(parameter: Parameter, words: Sequence[str]) -> Iterable[Candidate]:
    if parameter.choices:
        return [(choice, "") for choice in parameter.choices]
    if parameter.shape.complete:
        return _stored(parameter.shape.complete, words)
    return []


def _stored(kind: str, words: Sequence[str]) -> list[Candidate]:
    """Names of that kind in the storage; none if it cannot be read, without a word about it."""
    from omniq.errors import OmniqError
    from omniq.settings import Settings
    from omniq.storage import open_storage
    from omniq.storage.urls import local_path, storage_url

    async def read() -> list[Candidate]:
        async with open_storage(settings=settings) as storage:
            return await _SOURCES[kind](storage)

    with suppress(OmniqError, OSError, TimeoutError):
        settings = Settings.load(url=_url_among(words))
        path = local_path(storage_url(settings))
        if path is None or path.exists():
            found = asyncio.run(asyncio.wait_for(read(), _TIMEOUT))
            return [(name, help) for name, help in found if is_harmless(name)]
    return []


def is_harmless(name: str) -> bool:
    """Whether the name may become part of a command line: a shell executes nothing of it.

    >>> [is_harmless(name) for name in ("mail.eu", "a:b", "$(id)", "a b", "*", "\\x1b[2J")]
    [True, True, False, False, False, False]
    """
    return _HARMLESS.fullmatch(name) is not None


def _url_among(words: Sequence[str]) -> str | None:
    for at, word in enumerate(words):
        if word == "--url":
            return "".join(words[at + 1 : at + 2]) or None
        if word.startswith("--url="):
            return word.removeprefix("--url=")
    return None


async def _queues(storage: BaseStorage) -> list[Candidate]:
    from omniq.operations.overview import queue_summaries

    found = await queue_summaries(storage)
    return [(line.name, f"{line.waiting} waiting") for line in found][:_MAX_NAMES]


async def _tasks(storage: BaseStorage) -> list[Candidate]:
    from omniq.operations.newest import newest_tasks

    found = await newest_tasks(storage, _MAX_NAMES)
    return [(task.id, f"{task.status} {task.func_path}") for task in found]


async def _dead(storage: BaseStorage) -> list[Candidate]:
    from omniq.operations.newest import newest_dead

    found = await newest_dead(storage, _MAX_NAMES)
    return [(letter.task_id, letter.func_path) for letter in found]


async def _functions(storage: BaseStorage) -> list[Candidate]:
    from omniq.operations.newest import newest_tasks

    found = await newest_tasks(storage, _MAX_NAMES)
    return [(path, "") for path in sorted({task.func_path for task in found})]


async def _schedules(storage: BaseStorage) -> list[Candidate]:
    found = await storage.list_schedules()
    return [(each.id, each.task.func_path) for each in found][:_MAX_NAMES]


async def _workers(storage: BaseStorage) -> list[Candidate]:
    from omniq.operations.health import live_workers

    found = await live_workers(storage)
    return [(worker.id, f"{worker.host}:{worker.pid}") for worker in found][:_MAX_NAMES]


async def _breakers(storage: BaseStorage) -> list[Candidate]:
    from omniq.operations.health import breakers_of

    found = await breakers_of(storage)
    return [(breaker.name, str(breaker.state)) for breaker in found][:_MAX_NAMES]


_SOURCES: dict[str, Callable[[BaseStorage], Awaitable[list[Candidate]]]] = {
    "breaker": _breakers,
    "dead": _dead,
    "function": _functions,
    "queue": _queues,
    "schedule": _schedules,
    "task": _tasks,
    "worker": _workers,
}
