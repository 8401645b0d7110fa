"""Must not be imported, whatever a record says."""

from __future__ import annotations

from omniq import task


@task
def marked() -> None:
    from tests.security.shop_package import RAN

    RAN.append("not_imported.marked")
