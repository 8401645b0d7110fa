"""An object of a framework can stand for a function; the rules hold for the function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from omniq.errors import ForbiddenFunction, SettingsError
from omniq.tasks.functions import FunctionCache
from omniq.worker.process.supervisor import Worker


class Wrapped:
    """As Django's tasks are: not callable, but with a function inside."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __omniq_function__(self) -> Callable[..., Any]:
        return self._func


def double(number: int) -> int:
    return number * 2


wrapped = Wrapped(double)
foreign = Wrapped(os.getcwd)
pretending = SimpleNamespace(__omniq_function__=lambda: double)


def test_the_function_inside_is_found():
    assert FunctionCache([__name__]).resolve(f"{__name__}.wrapped") is double


def test_what_it_stands_for_must_be_allowed_itself(monkeypatch):
    elsewhere = ModuleType("elsewhere_of_this_test")
    elsewhere.__dict__["lent"] = wrapped
    monkeypatch.setitem(sys.modules, elsewhere.__name__, elsewhere)

    with pytest.raises(ForbiddenFunction, match="it comes from"):
        FunctionCache([elsewhere.__name__]).resolve(f"{elsewhere.__name__}.lent")
    with pytest.raises(ForbiddenFunction, match="builtin"):
        FunctionCache().resolve(f"{__name__}.foreign")


def test_an_object_that_merely_has_the_attribute_does_not_count():
    with pytest.raises(ForbiddenFunction, match="not a function"):
        FunctionCache().resolve(f"{__name__}.pretending")


def test_a_listener_that_is_not_there_is_said_before_anything_is_claimed():
    worker = Worker("memory://", [__name__], listeners=["nowhere.at_all"])

    with pytest.raises(SettingsError, match=r"nowhere\.at_all cannot be imported"):
        worker.start()
