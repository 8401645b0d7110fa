"""A griffe extension: documents `x = blocking(AsyncClass.x)` as the method that it is.

griffe reads the source and does not run it, so it takes such a line for an attribute.
"""

from __future__ import annotations

from typing import Any

import griffe


class BlockingMethods(griffe.Extension):
    """Gives each method that `blocking` makes the signature and docstring of its async form."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in _modules(pkg):
            for cls in module.classes.values():
                if not cls.is_alias:
                    for attribute in list(cls.attributes.values()):
                        _replace(cls, attribute)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [each for each in module.modules.values() if not each.is_alias]
    return [module, *(found for each in inner for found in _modules(each))]


def _replace(cls: griffe.Class, attribute: griffe.Attribute) -> None:
    value = attribute.value
    if not isinstance(value, griffe.ExprCall) or value.function.canonical_name != "blocking":
        return
    path = value.arguments[0].canonical_path  # type: ignore[union-attr]  # always AsyncClass.method
    source = cls.modules_collection[path]
    cls.set_member(
        attribute.name,
        griffe.Function(
            attribute.name,
            lineno=attribute.lineno,
            endlineno=attribute.endlineno,
            parameters=source.parameters,
            returns=source.returns,
            docstring=source.docstring,
        ),
    )
