"""Server check: the server's settings that decide durability and speed, for `omniq doctor`."""

from __future__ import annotations

from omniq.storage.postgres.statements import Statements

Finding = tuple[str, str, str]
"""Name, value, and the verdict: "ok", "warn: …" or "bad: …"."""

_QUERY = (
    "SELECT pg_catalog.current_setting('server_version') AS server_version, "
    "coalesce(pg_catalog.host(pg_catalog.inet_server_addr()), 'a socket') AS server, "
    "pg_catalog.current_setting('fsync') AS fsync, "
    "pg_catalog.current_setting('synchronous_commit') AS synchronous_commit, "
    "pg_catalog.current_setting('full_page_writes') AS full_page_writes, "
    "pg_catalog.current_setting('transaction_read_only') AS read_only, "
    "pg_catalog.pg_is_in_recovery() AS in_recovery, "
    "pg_catalog.current_setting('autovacuum') AS autovacuum, "
    "pg_catalog.current_setting('server_encoding') AS encoding"
)


async def report(statements: Statements) -> list[Finding]:
    """Read the server's settings and judge them."""
    (found,) = await statements.fetch(_QUERY)
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
