"""Server check: the server's settings that decide durability and speed, for `omniq doctor`."""

from __future__ import annotations

from omniq.storage.postgres.connection import Connection

Finding = tuple[str, str, str]
"""Name, value, and the verdict: "ok", "warn: …" or "bad: …"."""

_QUERY = (
    "SELECT current_setting('server_version') AS server_version, "
    "coalesce(host(inet_server_addr()), 'a socket') AS server, "
    "current_setting('fsync') AS fsync, "
    "current_setting('synchronous_commit') AS synchronous_commit, "
    "current_setting('full_page_writes') AS full_page_writes, "
    "current_setting('transaction_read_only') AS read_only, "
    "pg_is_in_recovery() AS in_recovery, "
    "current_setting('autovacuum') AS autovacuum, "
    "current_setting('server_encoding') AS encoding, "
    "abs(extract(epoch FROM clock_timestamp()) * 1000000 - $1)::bigint AS clock_difference"
)
_LARGEST_CLOCK_DIFFERENCE = 1_000_000


async def report(db: Connection, now: int) -> list[Finding]:
    """Read the server's settings and judge them; `now` is this machine's time in microseconds."""
    found = await db.fetchrow(_QUERY, now)
    role = "on a standby server" if found["in_recovery"] else "on the primary server"
    return [
        ("version", found["server_version"], "ok"),
        ("server", found["server"], "ok"),
        ("fsync", found["fsync"], _fsync_verdict(found["fsync"])),
        (
            "synchronous_commit",
            found["synchronous_commit"],
            _synchronous_commit_verdict(found["synchronous_commit"]),
        ),
        (
            "full_page_writes",
            found["full_page_writes"],
            _full_page_writes_verdict(found["full_page_writes"]),
        ),
        (
            "writable",
            f"{'no' if found['read_only'] == 'on' else 'yes'}, {role}",
            "bad: nothing can be enqueued here; connect to the primary server"
            if found["read_only"] == "on" or found["in_recovery"]
            else "ok",
        ),
        (
            "autovacuum",
            found["autovacuum"],
            "ok"
            if found["autovacuum"] == "on"
            else "warn: claims become slower without it; set autovacuum = on",
        ),
        (
            "encoding",
            found["encoding"],
            "ok"
            if found["encoding"] == "UTF8"
            else "warn: names with characters beyond ASCII may be refused",
        ),
        (
            "clock",
            f"differs by {found['clock_difference'] / 1000:.0f} ms from this machine's",
            "ok"
            if found["clock_difference"] < _LARGEST_CLOCK_DIFFERENCE
            else "warn: leases use the server's clock, etas the clock of the enqueuing machine",
        ),
    ]


def _fsync_verdict(value: str) -> str:
    return "ok" if value == "on" else "bad: a power cut can destroy the whole database"


def _synchronous_commit_verdict(value: str) -> str:
    if value == "off":
        return "warn: a server crash loses what was acknowledged during the last second"
    return "ok"


def _full_page_writes_verdict(value: str) -> str:
    return "ok" if value == "on" else "warn: a power cut can leave torn pages"
