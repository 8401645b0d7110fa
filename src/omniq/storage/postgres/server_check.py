"""What a server's settings promise, for `omniq doctor`."""

from __future__ import annotations

from omniq.storage.postgres.connection import Connection

Finding = tuple[str, str, str]
"""Name, value, and "ok", "warn: …" or "bad: …"."""

_ASKED = (
    "SELECT current_setting('server_version') AS server_version, "
    "coalesce(host(inet_server_addr()), 'a socket') AS server, "
    "current_setting('fsync') AS fsync, "
    "current_setting('synchronous_commit') AS synchronous_commit, "
    "current_setting('full_page_writes') AS full_page_writes, "
    "current_setting('transaction_read_only') AS read_only, "
    "pg_is_in_recovery() AS in_recovery, "
    "current_setting('autovacuum') AS autovacuum, "
    "current_setting('server_encoding') AS encoding, "
    "abs(extract(epoch FROM clock_timestamp()) * 1000000 - $1)::bigint AS apart"
)
_LARGEST_GAP = 1_000_000


async def report(db: Connection, now: int) -> list[Finding]:
    """What was found, and what to think of it."""
    found = await db.fetchrow(_ASKED, now)
    standby = "on a standby server" if found["in_recovery"] else "on the primary server"
    return [
        ("version", found["server_version"], "ok"),
        ("server", found["server"], "ok"),
        ("fsync", found["fsync"], _fsync(found["fsync"])),
        ("synchronous_commit", found["synchronous_commit"], _commit(found["synchronous_commit"])),
        ("full_page_writes", found["full_page_writes"], _pages(found["full_page_writes"])),
        (
            "writable",
            f"{'no' if found['read_only'] == 'on' else 'yes'}, {standby}",
            "bad: nothing can be enqueued here; connect to the primary server"
            if found["read_only"] == "on" or found["in_recovery"]
            else "ok",
        ),
        (
            "autovacuum",
            found["autovacuum"],
            "ok" if found["autovacuum"] == "on" else "warn: claims get slower without it",
        ),
        (
            "encoding",
            found["encoding"],
            "ok" if found["encoding"] == "UTF8" else "warn: names beyond ASCII may be refused",
        ),
        (
            "clock",
            f"{found['apart'] / 1000:.0f} ms apart from this machine's",
            "ok"
            if found["apart"] < _LARGEST_GAP
            else "warn: leases go by the server's clock, etas by their sender's",
        ),
    ]


def _fsync(value: str) -> str:
    return "ok" if value == "on" else "bad: a power cut can destroy the whole database"


def _commit(value: str) -> str:
    if value == "off":
        return "warn: a crash of the server loses what it acknowledged in the last second"
    return "ok"


def _pages(value: str) -> str:
    return "ok" if value == "on" else "warn: a power cut can leave torn pages behind"
