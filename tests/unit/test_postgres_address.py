"""The URL of PostgreSQL servers is read, and refused before a connection is opened."""

from __future__ import annotations

import pytest

from omniq.errors import SettingsError
from omniq.storage.postgres import PostgresStorage
from omniq.storage.postgres.address import servers


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://", []),
        ("postgresql://me:pw@db/app", []),
        ("postgresql://me:p%2Cw@db/app", []),
        ("postgresql://me:pw@db1,db2/app", ["db1:5432", "db2:5432"]),
        ("postgresql://db1:6000,db2:6001,db3/app", ["db1:6000", "db2:6001", "db3:5432"]),
        ("postgresql://db1,db2/app?port=6000", ["db1:6000", "db2:6000"]),
        ("postgresql://db1,db2/app?port=6000,6001", ["db1:6000", "db2:6001"]),
        ("postgresql://[::1]:6000,[fe80::2]/app", ["::1:6000", "fe80::2:5432"]),
        ("postgresql://me@/app?host=db1,db2:7000", ["db1:5432", "db2:7000"]),
        ("postgresql:///app?host=/run/a,/run/b&port=1,2", ["/run/a:1", "/run/b:2"]),
        ("postgresql://%2Frun%2Fa,db/app", ["/run/a:5432", "db:5432"]),
    ],
)
def test_several_servers_of_a_url_are_found(url: str, expected: list[str]) -> None:
    assert [str(server) for server in servers(url)] == expected


@pytest.mark.parametrize("role", ["standby", "read-only", "prefer-standby"])
def test_a_url_that_asks_for_a_standby_is_refused(role: str) -> None:
    url = f"postgresql://me:secret@db1,db2/app?target_session_attrs={role}"
    with pytest.raises(SettingsError, match=f"{role} asks for a server that cannot be") as refused:
        PostgresStorage(url)

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "rest", ["db1:x,db2/app", "db1,db2/app?port=70000", "db1,db2/app?port=one", "db1,db2:0/app"]
)
def test_a_url_with_an_unusable_port_is_refused(rest: str) -> None:
    with pytest.raises(SettingsError, match="is the port a number"):
        PostgresStorage(f"postgresql://me:secret@{rest}")
