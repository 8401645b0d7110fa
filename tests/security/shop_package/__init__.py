"""A package of a user, of which a worker may be given the name: tasks, helpers and imported names."""

from __future__ import annotations

from omniq import task
from tests.security.shop_package.helpers import wipe as imported_helper

__all__ = ["imported_helper"]

RAN: list[str] = []
"""The names of the functions that have run."""


def plain() -> None:
    RAN.append("plain")


@task
def marked() -> None:
    RAN.append("marked")


def _private() -> None:
    RAN.append("_private")


@task
def _private_and_marked() -> None:
    RAN.append("_private_and_marked")


alias_of_private = _private


class Tools:
    @staticmethod
    def static() -> None:
        RAN.append("Tools.static")

    @staticmethod
    def _private() -> None:
        RAN.append("Tools._private")

    def method(self) -> None:
        RAN.append("Tools.method")


class _Hidden:
    @staticmethod
    def static() -> None:
        RAN.append("_Hidden.static")
