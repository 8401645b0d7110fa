"""`__omniq_function__`: an object of a framework can wrap a task's function."""

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
    """An object that wraps a function and is not callable, like a Django task."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __omniq_function__(self) -> Callable[..., Any]:
        return self._func


def double(number: int) -> int:
    return number * 2


wrapped = Wrapped(double)
builtin = Wrapped(os.getcwd)
namespace = SimpleNamespace(__omniq_function__=lambda: double)


def test_the_wrapped_function_is_found():
    assert FunctionCache([__name__]).resolve(f"{__name__}.wrapped") is double


def test_the_wrapped_function_itself_must_be_allowed(monkeypatch):
    other = ModuleType("other_module_of_this_test")
    other.__dict__["borrowed"] = wrapped
    monkeypatch.setitem(sys.modules, other.__name__, other)

    with pytest.raises(ForbiddenFunction, match="it comes from"):
        FunctionCache([other.__name__]).resolve(f"{other.__name__}.borrowed")
    with pytest.raises(ForbiddenFunction, match="builtin"):
        FunctionCache().resolve(f"{__name__}.builtin")


def test_the_attribute_must_be_defined_by_the_class():
    with pytest.raises(ForbiddenFunction, match="not a function"):
        FunctionCache().resolve(f"{__name__}.namespace")


def test_a_missing_listener_is_an_error_before_any_claim():
    worker = Worker("memory://", [__name__], listeners=["nowhere.at_all"])

    with pytest.raises(SettingsError, match=r"nowhere\.at_all cannot be imported"):
        worker.start()
