"""Several Redis servers for tests: a primary with replicas under Sentinels, and a cluster.

    with SentinelGroup() as group:
        group.url                 # redis+sentinel://:…@127.0.0.1:…,127.0.0.1:…/omniq?…
        group.primary().kill()
        group.await_primary()     # the replica that the Sentinels have promoted

All servers of a group have one password. The programs are those of `RedisServer`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hiredis

from omniq.testing.servers import RedisServer, ServerFailed

_PATIENCE = 60.0
_PAUSE = 0.02
_SLOTS = 16_384
SERVICE = "omniq"


def ask(server: RedisServer, *command: str | int) -> Any:
    """The reply of a server to one command; an error reply is raised. Raises `OSError` if it is down."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        for parts in (("AUTH", server.password), command):
            words = [str(part).encode() for part in parts]
            connection.sendall(
                b"*%d\r\n" % len(words)
                + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
            )
        reader = hiredis.Reader()
        replies: list[Any] = []
        while len(replies) < 2:
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise reply
    return replies[1]


def info(server: RedisServer, section: str) -> dict[str, str]:
    """One section of what a server says of itself."""
    lines = (line.partition(":") for line in ask(server, "INFO", section).decode().splitlines())
    return {name: value for name, colon, value in lines if colon}


def wait_until(condition: Callable[[], bool], what: str, within: float = _PATIENCE) -> None:
    """Poll until the condition holds; a server that is down counts as no."""
    deadline = time.monotonic() + within
    while True:
        with suppress(OSError, hiredis.ReplyError, hiredis.ProtocolError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise ServerFailed(f"not within {within:g} s: {what}")
        time.sleep(_PAUSE)


class _Sentinel(RedisServer):
    """A Sentinel. It writes what it learns into its configuration file."""

    def __init__(self, primary: RedisServer, *, quorum: int, down_after: float) -> None:
        super().__init__(program=primary._program)
        self.password = primary.password
        self._watched = primary
        self._quorum = quorum
        self._down_after = round(down_after * 1000)

    def _command(self) -> list[str]:
        config = self._folder / "sentinel.conf"
        if not config.exists():
            config.write_text(
                f"bind 127.0.0.1\ndir {self._folder}\nrequirepass {self.password}\n"
                f"sentinel sentinel-pass {self.password}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {self._watched.port} {self._quorum}\n"
                f"sentinel auth-pass {SERVICE} {self.password}\n"
                f"sentinel down-after-milliseconds {SERVICE} {self._down_after}\n"
                f"sentinel failover-timeout {SERVICE} 5000\n"
            )
        return [str(self._program), str(config), "--sentinel", "--port", str(self.port)]


class _Group:
    """Servers that start and end together."""

    def __init__(self) -> None:
        self.servers: list[RedisServer] = []
        self._stack = ExitStack()

    def start(self) -> None:
        """Start all servers, and wait until they work together."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End all servers, and remove their data."""
        self._stack.close()

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


class SentinelGroup(_Group):
    """A primary, its replicas, and three Sentinels that promote one when the primary is gone."""

    def __init__(
        self,
        *,
        replicas: int = 1,
        durable: bool = False,
        down_after: float = 1.0,
        options: dict[str, str] | None = None,
        program: Path | None = None,
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._durable = durable
        self._down_after = down_after
        self._options = options or {}
        self._program = program
        self.sentinels: list[_Sentinel] = []

    @property
    def url(self) -> str:
        """The URL for omniq."""
        password = self.servers[0].password
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://:{password}@{hosts}/{SERVICE}?sentinel_password={password}"

    def primary(self) -> RedisServer:
        """The server that the first Sentinel which answers takes for the primary."""
        for sentinel in self.sentinels:
            with suppress(OSError):
                _, port = ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                return next(each for each in self.servers if each.port == int(port))
        raise ServerFailed("no Sentinel answers")

    def await_primary(self, *, other_than: RedisServer | None = None) -> RedisServer:
        """Wait for a primary that all Sentinels agree on, and that takes writes; return it."""
        found: list[RedisServer] = []

        def is_agreed() -> bool:
            ports = {
                int(ask(each, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])
                for each in self.sentinels
                if each.is_running
            }
            found[:] = [each for each in self.servers if {each.port} == ports]
            return bool(found) and found[0] is not other_than and _role(found[0]) == "master"

        wait_until(is_agreed, "the Sentinels agree on a primary")
        return found[0]

    def await_replicas(self) -> None:
        """Wait until all other servers that run are replicas of the primary and up to date."""

        def are_current() -> bool:
            # The Sentinels may promote another one meanwhile, as after a pause of the machine.
            primary = self.await_primary()
            others = [each for each in self.servers if each is not primary and each.is_running]
            written = int(info(primary, "replication")["master_repl_offset"])
            states = [info(each, "replication") for each in others]
            known = [
                int(ask(each, "SENTINEL", "CKQUORUM", SERVICE) and _replicas_of(each))
                for each in self.sentinels
            ]
            return all(
                state["role"] == "slave"
                and state["master_port"] == str(primary.port)
                and state["master_link_status"] == "up"
                and int(state["slave_repl_offset"]) >= written
                for state in states
            ) and min(known) >= len(others)

        wait_until(are_current, "the replicas are up to date")

    def _start(self) -> None:
        for number in range(1 + self._replicas):
            options = {"repl-diskless-sync-delay": "0", "repl-timeout": "10", **self._options}
            if number:
                options["replicaof"] = f"127.0.0.1 {self.servers[0].port}"
            server = RedisServer(durable=self._durable, options=options, program=self._program)
            if self.servers:
                server.password = self.servers[0].password
            # Each of them may be the replica of another one later.
            server._options["masterauth"] = server.password
            self.servers.append(self._stack.enter_context(server))
        for _ in range(3):
            sentinel = _Sentinel(self.servers[0], quorum=2, down_after=self._down_after)
            self.sentinels.append(self._stack.enter_context(sentinel))
        wait_until(self._sentinels_know_each_other, "the Sentinels know each other")
        self.await_replicas()

    def _sentinels_know_each_other(self) -> bool:
        return all(
            ask(each, "SENTINEL", "CKQUORUM", SERVICE).startswith(b"OK 3 usable")
            for each in self.sentinels
        )


class RedisCluster(_Group):
    """Three primaries, each with a third of the slots, and a replica of each if wanted."""

    def __init__(
        self,
        *,
        replicas: int = 0,
        durable: bool = False,
        options: dict[str, str] | None = None,
        program: Path | None = None,
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._durable = durable
        self._options = options or {}
        self._program = program

    @property
    def url(self) -> str:
        """The URL for omniq, with all servers."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://:{self.servers[0].password}@{hosts}"

    def owner_of(self, slot: int) -> RedisServer:
        """The server that has the slot, as the first server that runs knows it."""
        asked = next(each for each in self.servers if each.is_running)
        for first, last, (_, port, *_), *_ in ask(asked, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(each for each in self.servers if each.port == port)
        raise ServerFailed(f"no server has slot {slot}")

    def move(self, slot: int, target: RedisServer) -> None:
        """Move a slot with all its keys to another server, as `redis-cli --cluster reshard` does it."""
        source = self.begin_move(slot, target)
        while self.move_keys(slot, source, target, 10):
            pass
        self.end_move(slot, target)

    def begin_move(self, slot: int, target: RedisServer) -> RedisServer:
        """Begin to move a slot; returns the server that has it."""
        source = self.owner_of(slot)
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
        return source

    def move_keys(self, slot: int, source: RedisServer, target: RedisServer, count: int) -> int:
        """Move some keys of the slot; returns how many."""
        keys = [key.decode() for key in ask(source, "CLUSTER", "GETKEYSINSLOT", slot, count)]
        if keys:
            where = ("127.0.0.1", target.port, "", 0, 5000, "AUTH", target.password)
            ask(source, "MIGRATE", *where, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, target: RedisServer) -> None:
        """Give the slot to its new server."""
        for server in [target, *(each for each in self.servers if each is not target)]:
            with suppress(hiredis.ReplyError):
                # Replicas learn it from their primary.
                ask(server, "CLUSTER", "SETSLOT", slot, "NODE", node_id(target))

    def _start(self) -> None:
        password = ""
        for _ in range(3 * (1 + self._replicas)):
            options = {
                "cluster-enabled": "yes",
                "cluster-node-timeout": "1500",
                "repl-diskless-sync-delay": "0",
                **self._options,
            }
            server = RedisServer(durable=self._durable, options=options, program=self._program)
            password = server.password = password or server.password
            server._options["masterauth"] = password
            self.servers.append(self._stack.enter_context(server))
        primaries, replicas = self.servers[:3], self.servers[3:]
        for number, server in enumerate(primaries):
            bounds = [_SLOTS * part // 3 for part in (number, number + 1)]
            ask(server, "CLUSTER", "ADDSLOTS", *range(*bounds))
            ask(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            ask(server, "CLUSTER", "MEET", "127.0.0.1", primaries[0].port)
        wait_until(self._is_whole, "the cluster is complete")
        for number, server in enumerate(replicas):
            ask(server, "CLUSTER", "REPLICATE", node_id(primaries[number % 3]))
        self.await_replicas()

    def _is_whole(self) -> bool:
        return all(
            b"cluster_state:ok" in (state := ask(server, "CLUSTER", "INFO"))
            and b"cluster_known_nodes:%d" % len(self.servers) in state
            for server in self.servers
        )

    def await_replicas(self) -> None:
        """Wait until all servers that run agree, and each replica is up to date."""
        running = [each for each in self.servers if each.is_running]
        wait_until(
            lambda: all(b"cluster_state:ok" in ask(each, "CLUSTER", "INFO") for each in running),
            "the cluster works",
        )

        def are_current() -> bool:
            states = {str(each.port): info(each, "replication") for each in running}
            written = {
                port: int(state["master_repl_offset"])
                for port, state in states.items()
                if state["role"] == "master"
            }
            replicas = [state for state in states.values() if state["role"] == "slave"]
            return len(replicas) == len(running) - 3 and all(
                state["master_link_status"] == "up"
                and int(state["slave_repl_offset"]) >= written.get(state["master_port"], 0)
                for state in replicas
            )

        wait_until(are_current, "the replicas are up to date")


def node_id(server: RedisServer) -> str:
    """The name of a server in its cluster."""
    name: bytes = ask(server, "CLUSTER", "MYID")
    return name.decode()


def _role(server: RedisServer) -> str:
    role: bytes = ask(server, "ROLE")[0]
    return role.decode()


def _replicas_of(sentinel: RedisServer) -> int:
    """How many replicas a Sentinel could promote."""
    fields = ask(sentinel, "SENTINEL", "REPLICAS", SERVICE)
    states = [dict(zip(each[::2], each[1::2], strict=True)) for each in fields]
    return sum(state[b"flags"] == b"slave" for state in states)
