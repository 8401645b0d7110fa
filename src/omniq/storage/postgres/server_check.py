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
    "current_setting('server_encoding') AS encoding"
)


async def report(db: Connection) -> list[Finding]:
    """Read the server's settings and judge them."""
    found = await db.fetchrow(_QUERY)
    fsync, commit, pages = (
        found[name] for name in ("fsync", "synchronous_commit", "full_page_writes")
    )
    role = "on a standby server" if found["in_recovery"] else "on the primary server"
    is_writable = found["read_only"] != "on"
    return [
        ("version", found["server_version"], "ok"),
        ("server", found["server"], "ok"),
        _judge("fsync", fsync, fsync == "on", "bad: a power cut can destroy the whole database"),
        _judge(
            "synchronous_commit",
            commit,
            commit != "off",
            "warn: a server crash loses what was acknowledged during the last second",
        ),
        _judge("full_page_writes", pages, pages == "on", "warn: a power cut can leave torn pages"),
        _judge(
            "writable",
            f"{'yes' if is_writable else 'no'}, {role}",
            is_writable and not found["in_recovery"],
            "bad: nothing can be enqueued here; connect to the primary server",
        ),
        _judge(
            "autovacuum",
            found["autovacuum"],
            found["autovacuum"] == "on",
            "warn: claims become slower without it; set autovacuum = on",
        ),
        _judge(
            "encoding",
            found["encoding"],
            found["encoding"] == "UTF8",
            "warn: names with characters beyond ASCII may be refused",
        ),
    ]


def _judge(name: str, value: str, is_good: bool, problem: str) -> Finding:
    return name, value, "ok" if is_good else problem
