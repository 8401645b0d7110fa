"""Named places where a test can make the process die, stop, wait, fail or skip a step.

Configured by the environment, for a process that a test starts and cannot call into:

    OMNIQ_FAILPOINTS="claim.after_write=kill:0.02, record.before_write=raise:EIO, enqueue.after_write=delay:50@3"

One entry is `name=action`, then the argument of the action if it takes one, then when to act:
`:p` with probability p, `@n` only at the n-th hit, nothing for every hit.

    kill          SIGKILL to this process            stop        SIGSTOP to this process
    exit          leave immediately, with status 70      raise:NAME  OSError with that errno
    delay:MS      block the thread for milliseconds  skip        `hit` is True: leave the step out
    count         only count

The name `*` stands for every failpoint without an entry. While any failpoint is configured, the
hits of all are counted, so that a run can prove that it reached them.
"""

from __future__ import annotations

import errno
import math
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import Literal, assert_never, cast, get_args

from omniq.errors import SettingsError

VARIABLE = "OMNIQ_FAILPOINTS"
EXIT_STATUS = 70

_Action = Literal["kill", "stop", "exit", "raise", "delay", "skip", "count"]
_NAME = re.compile(r"\*|[a-z0-9_]+(\.[a-z0-9_]+)*")


@dataclass(frozen=True, slots=True)
class _Rule:
    """What to do at one failpoint, and when: at the n-th hit, with a probability, or each time."""

    action: _Action
    errno: int = 0
    seconds: float = 0.0
    probability: float = 1.0
    nth: int | None = None


_lock = threading.Lock()
_rules: dict[str, _Rule] = {}
_hits: dict[str, int] = {}
_active = False


def hit(name: str) -> bool:
    """Act at the failpoint `name`. True tells the caller to skip the step that follows."""
    if not _active:
        return False
    return _act(name)


def hits() -> dict[str, int]:
    """The number of hits of each failpoint since failpoints were configured."""
    with _lock:
        return dict(_hits)


def configure(text: str) -> None:
    """Replace all rules by those of `text`, and reset the counts to 0.

    Raises `SettingsError`, and changes nothing, when the text cannot be parsed.
    """
    rules = parse(text)
    _install(rules)


def reset() -> None:
    """Remove all rules and counts."""
    _install({})


def parse(text: str) -> dict[str, _Rule]:
    """The rules of a text in the format of `OMNIQ_FAILPOINTS`, by name.

    >>> parse("claim.after_write=delay:50@3")["claim.after_write"].seconds
    0.05
    """
    rules: dict[str, _Rule] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, rule = (part.strip() for part in entry.partition("="))
        if not equals or not _NAME.fullmatch(name):
            raise _bad(entry, "expected name=action, the name in lower case, such as claim.begin")
        if name in rules:
            raise _bad(entry, "this name has an entry already")
        rules[name] = _parse_rule(entry, rule)
    return rules


def _parse_rule(entry: str, text: str) -> _Rule:
    spec, at, nth = text.partition("@")
    action, *arguments = (part.strip() for part in spec.split(":"))
    if action not in get_args(_Action):
        raise _bad(entry, f"the action must be one of {', '.join(get_args(_Action))}")
    error = _parse_errno(entry, arguments) if action == "raise" else 0
    seconds = _parse_delay(entry, arguments) if action == "delay" else 0.0
    if len(arguments) > 1:
        raise _bad(entry, f"too many arguments for {action}")
    return _Rule(
        action=cast(_Action, action),
        errno=error,
        seconds=seconds,
        probability=_parse_probability(entry, arguments[0]) if arguments else 1.0,
        nth=_parse_nth(entry, nth.strip()) if at else None,
    )


def _parse_errno(entry: str, arguments: list[str]) -> int:
    name = arguments.pop(0) if arguments else ""
    number = getattr(errno, name, None) if name.startswith("E") else None
    if not isinstance(number, int):
        raise _bad(entry, "raise needs the name of an errno, such as raise:EIO")
    return number


def _parse_delay(entry: str, arguments: list[str]) -> float:
    try:
        millis = float(arguments.pop(0))
    except (IndexError, ValueError):
        millis = math.nan
    if not (math.isfinite(millis) and millis >= 0):
        raise _bad(entry, "delay needs milliseconds, such as delay:50")
    return millis / 1000


def _parse_probability(entry: str, text: str) -> float:
    try:
        probability = float(text)
    except ValueError:
        probability = math.nan
    if not 0 < probability <= 1:
        raise _bad(entry, f"{text!r} is not a probability above 0 and up to 1")
    return probability


def _parse_nth(entry: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise _bad(entry, f"after @ expected which hit to act at, 1 or more, not {text!r}")
    return int(text)


def _bad(entry: str, why: str) -> SettingsError:
    return SettingsError(f"{VARIABLE}: {entry!r}: {why}")


def _install(rules: dict[str, _Rule]) -> None:
    global _active, _rules
    with _lock:
        _rules = rules
        _hits.clear()
        _active = bool(rules)


def _act(name: str) -> bool:
    with _lock:
        count = _hits[name] = _hits.get(name, 0) + 1
        rule = _rules.get(name) or _rules.get("*")
    if rule is None or not _is_due(rule, count):
        return False
    match rule.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(EXIT_STATUS)
        case "raise":
            raise OSError(rule.errno, f"{os.strerror(rule.errno)} (failpoint {name})")
        case "delay":
            # Real time and a blocked thread on purpose: this simulates a machine that stalls.
            time.sleep(rule.seconds)
        case "skip":
            return True
        case "count":
            pass
        case _:
            assert_never(rule.action)
    return False


def _is_due(rule: _Rule, count: int) -> bool:
    if rule.nth is not None and rule.nth != count:
        return False
    # Not the engine's clock: a draw from it would change the course of a seeded simulation.
    return rule.probability >= 1 or random.random() < rule.probability


_install(parse(os.environ.get(VARIABLE, "")))
