"""A PostgreSQL server with a standby, which can take over: for tests of failovers.

with PostgresPair() as pair:
    pair.url                     # postgresql://omniq:…@127.0.0.1:…,127.0.0.1:…/postgres
    pair.primary.kill()
    pair.promote()               # the standby is the primary from now on
    pair.add_standby()           # the killed server comes back as its standby
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from omniq.testing.servers import PostgresServer, ServerFailed

_REPLICATES = {"wal_level": "replica", "max_wal_senders": "8", "wal_keep_size": "512MB"}


class PostgresPair:
    """A primary and its standby, which copies the primary continuously.

    With `waits_for_standby` an acknowledged write is on both servers, so that no failover loses it.
    """

    def __init__(
        self,
        *,
        waits_for_standby: bool = False,
        version: int = 18,
        options: dict[str, str] | None = None,
    ) -> None:
        options = {**_REPLICATES, **(options or {})}
        if waits_for_standby:
            # The standby need only have received it: a killed process loses nothing that it has written.
            options |= {"synchronous_standby_names": "*", "synchronous_commit": "remote_write"}
        self._waits = "synchronous_standby_names" in options
        self.primary = PostgresServer(options=options, version=version, durable=waits_for_standby)
        self.standby = PostgresServer(options=options, version=version, durable=waits_for_standby)

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            self.standby.start()
            self.standby.password = self.primary.password
            self.add_standby()
        except BaseException:
            self.close()
            raise
        self._both = self.primary, self.standby
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.primary.close()
        self.standby.close()

    @property
    def url(self) -> str:
        """The URL of both servers, in the same order after each failover."""
        servers = ",".join(f"127.0.0.1:{server.port}" for server in self._both)
        return f"postgresql://omniq:{self.primary.password}@{servers}/postgres"

    def promote(self) -> None:
        """Make the standby the primary. The old primary must have ended."""
        self._run(
            self.standby, "pg_ctl", "promote", "-w", "-D", f"{self._folder(self.standby)}/data"
        )
        self.primary, self.standby = self.standby, self.primary

    def add_standby(self) -> None:
        """Copy the primary to the other server, and start that as its standby."""
        standby, folder = self.standby, self._folder(self.standby)
        standby.kill()
        shutil.rmtree(folder / "data")
        url = self.primary.url + "?application_name=standby"
        self._run(
            standby, "pg_basebackup", "-d", url, "-D", f"{folder}/data", "-R", "-c", "fast", "-N"
        )
        standby.start()
        if self._waits:
            self._wait_until_it_follows()

    def _wait_until_it_follows(self) -> None:
        sql = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        while self._run(self.primary, "psql", "-qAt", "-d", self.primary.url, "-c", sql) != "1":
            pass

    def _run(self, server: PostgresServer, program: str, *arguments: str) -> str:
        command = [str(server.install / "bin" / program), *arguments]
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command,
            cwd=self._folder(server),
            capture_output=True,
            text=True,
            check=False,
            **server.identity(),
        )
        if done.returncode:
            raise ServerFailed(f"{program} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def _folder(self, server: PostgresServer) -> Path:
        assert server.folder is not None, "start the server first"
        return server.folder
