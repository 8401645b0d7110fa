"""Helpers below the package, and one task."""

from __future__ import annotations

from omniq import task


def wipe() -> None:
    from tests.security.shop_package import RAN

    RAN.append("helpers.wipe")


@task
def marked_below() -> None:
    from tests.security.shop_package import RAN

    RAN.append("helpers.marked_below")


@task
def _private_and_marked() -> None:
    from tests.security.shop_package import RAN

    RAN.append("helpers._private_and_marked")
