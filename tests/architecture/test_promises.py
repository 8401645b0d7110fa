"""Every numbered promise of the storage contract has a test, and every test names a real promise."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from omniq.storage import base, controls, flows, inspection, outputs, side_data
from omniq.testing.contract import StorageContract
from omniq.testing.contract._suite import ContractPart

_PROMISE = re.compile(r"^\s*([A-Z]\d+)\. ", re.MULTILINE)


def _numbered_promises() -> list[str]:
    """Return the numbers of the promises in the docstrings of the contract."""
    numbers = []
    for module in (base, side_data, outputs, controls, inspection, flows):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                numbers += _PROMISE.findall(ast.get_docstring(node) or "")
    return numbers


def _tests() -> dict[str, tuple[str, ...]]:
    """Return the tests of the suite, each with the promises that it names."""
    members = inspect.getmembers(StorageContract, inspect.isfunction)
    return {
        name: getattr(test, "promises", ()) for name, test in members if name.startswith("test_")
    }


def test_each_promise_is_made_once():
    promises = _numbered_promises()

    assert len(promises) > 60
    assert sorted(promises) == sorted(set(promises))


def test_each_promise_has_a_test():
    checked = {number for numbers in _tests().values() for number in numbers}

    assert sorted(set(_numbered_promises()) - checked) == []


def test_each_test_names_promises_that_are_made():
    promises = set(_numbered_promises())
    unknown = {
        name: sorted(set(numbers) - promises)
        for name, numbers in _tests().items()
        if not promises.issuperset(numbers)
    }

    assert unknown == {}


def test_no_two_parts_have_a_test_of_the_same_name():
    seen: dict[str, str] = {}
    for part in StorageContract.__bases__:
        for name in vars(part):
            if name.startswith("test_"):
                assert name not in seen, f"{part.__name__} and {seen[name]} both have {name}"
                seen[name] = part.__name__

    assert set(seen) == set(_tests())


def test_a_backend_may_add_tests_and_not_replace_one():
    replaced = next(iter(_tests()))

    type("TestMore", (StorageContract,), {"test_something_else": lambda self: None})
    with pytest.raises(TypeError, match=replaced):
        type("TestLess", (StorageContract,), {replaced: lambda self: None})


def test_every_part_belongs_to_the_contract():
    parts = {part for part in ContractPart.__subclasses__() if part.__module__.startswith("omniq.")}

    assert parts == set(StorageContract.__bases__)
