"""The connection to a NATS server. Its errors are raised as `StorageError`.

Only this module uses the driver. The driver's reconnect is off, because it would send buffered messages late.
After a lost connection the next call connects again; while there are subscriptions, a background task does.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from nats import errors as driver
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from omniq.clock import SYSTEM_CLOCK
from omniq.concurrency.backoff import backoff
from omniq.errors import SettingsError, StorageClosed, StorageError, StorageRefused
from omniq.storage.connection_advice import connect_timeout, network_advice
from omniq.storage.nats.address import Address
from omniq.storage.nats.api_errors import (
    CODES,
    FULL,
    REFUSALS,
    ApiError,
    NoResponders,
    StreamFull,
    Unanswered,
)

_T = TypeVar("_T")

_CONNECT_SECONDS = 5.0
_REPLY_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_BATCH, _BATCH_BYTES = 256, 16 << 20
_NANOSECONDS = 1_000_000_000


class Message(msgspec.Struct, frozen=True, gc=False):
    """A stored message."""

    subject: str
    data: bytes
    headers: dict[str, str]
    sequence: int


Receive = Callable[[bytes, str], None]
"""Called with the data of a message, and the subject for its reply."""


class _Session:
    """One connection, from its beginning to its end."""

    def __init__(self) -> None:
        self.client = Client()
        self.inbox = ""
        self.replies: dict[str, asyncio.Future[Msg]] = {}
        self.pieces: dict[str, bytes] = {}
        self.queues: set[asyncio.Queue[Msg | None]] = set()
        self.subscriptions: dict[str, Subscription] = {}
        self.problem = "the connection was closed"

    @property
    def is_open(self) -> bool:
        return bool(self.client.is_connected)

    async def connect(self, server: str, address: Address, options: dict[str, Any]) -> None:
        await self.client.connect(
            [server],
            allow_reconnect=False,
            # Notifications are for other processes: this one knows its own changes.
            no_echo=True,
            connect_timeout=int(_CONNECT_SECONDS),
            ping_interval=5,
            max_outstanding_pings=2,
            tls=address.tls,
            error_cb=self._on_error,
            **options,
        )
        self.inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self.inbox}.*", cb=self._on_reply)

    async def flush(self) -> None:
        """Return when the server has processed all messages that were sent.

        The driver would not notice before a timeout that the connection has ended meanwhile.
        """
        ended: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        # `end` fails it like a request that gets no reply.
        name = f"flush {id(ended)}"
        self.replies[name] = ended
        flushing = asyncio.ensure_future(self.client.flush())
        try:
            await asyncio.wait((flushing, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
            await flushing
        finally:
            flushing.cancel()
            self.replies.pop(name, None)

    async def _on_reply(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        if token in self.pieces and message.data[:1] == b"\x01":
            self.pieces[token] += message.data[1:]
            return
        future = self.replies.pop(token, None)
        if future is not None and not future.done():
            future.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        if not self.inbox:
            # Without an error, the driver would try this server repeatedly.
            raise error
        if "permissions violation" in str(error).lower():
            # The server sends no reply to such a request: its caller would wait until the timeout.
            self._fail(
                StorageRefused(f"{error}; allow this user $JS.API.>, _INBOX.> and oq.<store>.>")
            )

    def end(self, error: StorageError) -> None:
        """Fail everything that waits."""
        self._fail(error)
        for queue in self.queues:
            queue.put_nowait(None)

    def _fail(self, error: StorageError) -> None:
        for future in self.replies.values():
            if not future.done():
                future.set_exception(error)
        self.replies.clear()


class ServerConnection:
    """A connection to one of the servers of an address; used in one event loop."""

    def __init__(self, address: Address, *, name: str) -> None:
        self._address = address
        self._name = name
        self._session: _Session | None = None
        self._subscriptions: dict[str, Receive] = {}
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.sessions = 0
        """The number of connections so far: the server may have been restarted between two of them."""
        self.on_connect: Callable[[], None] = lambda: None

    @property
    def max_payload(self) -> int:
        """The largest message, in bytes."""
        return 1 << 20 if self._session is None else self._session.client.max_payload

    @property
    def version(self) -> tuple[int, int]:
        """The version of the server."""
        assert self._session is not None
        found = self._session.client.connected_server_version
        return found.major, found.minor

    # Requests

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        seconds: float = _REPLY_SECONDS,
    ) -> bytes:
        """The reply to a message that is sent once."""
        session = await self.connect()
        token = str(next(self._numbers))
        reply = session.replies[token] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await session.client.publish(subject, data, f"{session.inbox}.{token}", headers)
                message = await reply
        except TimeoutError as error:
            raise self._error(Unanswered, f"no answer within {seconds:g} s") from error
        except (driver.Error, OSError) as error:
            raise self._error(Unanswered, str(error) or type(error).__name__) from error
        finally:
            session.replies.pop(token, None)
        self._check_status(message)
        return bytes(message.data)

    def _check_status(self, message: Msg) -> None:
        if message.headers and message.headers.get("Status") == "503":
            raise self._error(NoResponders, "no process answers")

    async def exchange(self, subject: str, data: bytes) -> bytes:
        """The reply to data that may be larger than a message, from a process that uses `answer`."""
        session = await self.connect()
        token = str(next(self._numbers))
        reply = session.replies[token] = asyncio.get_running_loop().create_future()
        session.pieces[token] = b""
        try:
            await self._send(session, subject, data, f"{session.inbox}.{token}")
            message = await reply
            self._check_status(message)
            return session.pieces[token] + bytes(message.data[1:])
        except (driver.Error, OSError) as error:
            raise self._error(Unanswered, str(error) or type(error).__name__) from error
        finally:
            session.replies.pop(token, None)
            del session.pieces[token]

    async def answer(self, subject: str, data: bytes) -> None:
        """Reply to a request of `exchange`; without a connection the reply is lost."""
        session = self._session
        if session is not None and session.is_open:
            with suppress(driver.Error, OSError):
                await self._send(session, subject, data)

    async def _send(self, session: _Session, subject: str, data: bytes, reply: str = "") -> None:
        """Send data in pieces; the first byte of each piece says whether another one follows."""
        size = session.client.max_payload - 1
        for begin in range(0, len(data) - size, size):
            piece = b"\x01" + data[begin : begin + size]
            await session.client.publish(subject, piece, reply)
        last = (len(data) - 1) // size * size
        await session.client.publish(subject, b"\x00" + data[last:], reply)

    async def api(self, verb: str, kind: type[_T], **arguments: Any) -> _T:
        """The reply to a request of JetStream's API."""
        data = msgspec.json.encode(arguments) if arguments else b""
        return self._decoded(await self.request(f"$JS.API.{verb}", data), kind)

    async def store(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> int:
        """Store a message in the stream of its subject; returns its sequence number."""
        return self._decoded(await self.request(subject, data, headers), _Stored).seq

    def _decoded(self, reply: bytes, kind: type[_T]) -> _T:
        try:
            failure = msgspec.json.decode(reply, type=_Reply).error
            if failure is None:
                return msgspec.json.decode(reply, type=kind)
        except msgspec.MsgspecError as error:
            raise self._error(StorageError, f"a reply of an unexpected shape: {error}") from error
        text = f"{failure.description} ({failure.err_code})"
        if failure.err_code in REFUSALS:
            raise self._error(StorageRefused, f"{text}; {REFUSALS[failure.err_code]}")
        refusal = self._error(ApiError, text)
        refusal.kind = CODES.get(failure.err_code, "")
        if refusal.kind == FULL:
            raise self._error(
                StreamFull, f"{text}; raise the limits of the account or the stream, or purge tasks"
            )
        raise refusal

    async def messages(
        self, stream: str, first: int, last: int, subject: str = ""
    ) -> AsyncIterator[Message]:
        """The messages of a stream from one sequence number to another, as its leader has them.

        `StorageError` if not all of them arrive.
        """
        session = await self.connect()
        name = f"oq{SYSTEM_CLOCK.new_id()}"
        consumer = await self.api(
            f"CONSUMER.CREATE.{stream}.{name}",
            _Consumer,
            stream_name=stream,
            config={
                "name": name,
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": first,
                "ack_policy": "none",
                "replay_policy": "instant",
                "filter_subject": subject,
                "mem_storage": True,
                "num_replicas": 1,
                "inactive_threshold": 60 * _NANOSECONDS,
            },
        )
        queue: asyncio.Queue[Msg | None] = asyncio.Queue()
        session.queues.add(queue)
        inbox = session.client.new_inbox()

        async def receive(message: Msg) -> None:
            queue.put_nowait(message)

        subscription = None
        try:
            subscription = await session.client.subscribe(inbox, cb=receive)
            reached, pending = first - 1, consumer.num_pending
            while pending and reached < last:
                batch = min(_BATCH, pending)
                asked = {"batch": batch, "max_bytes": _BATCH_BYTES, "expires": 5 * _NANOSECONDS}
                await session.client.publish(
                    f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", msgspec.json.encode(asked), inbox
                )
                for _ in range(batch):
                    async with asyncio.timeout(_REPLY_SECONDS):
                        got = await queue.get()
                    if got is None:
                        raise self._error(Unanswered, session.problem)
                    if not got.reply:
                        # A status message, for example that the batch has reached its byte limit.
                        break
                    reached, pending = _place_of(got)
                    yield Message(got.subject, bytes(got.data), got.headers or {}, reached)
            if not subject and reached < last:
                raise self._error(StorageError, f"message {reached + 1} of {stream} did not arrive")
        except TimeoutError as error:
            raise self._error(Unanswered, "messages of a stream did not arrive") from error
        except (driver.Error, OSError) as error:
            raise self._error(Unanswered, str(error) or type(error).__name__) from error
        finally:
            session.queues.discard(queue)
            if session.is_open and subscription is not None:
                with suppress(driver.Error, OSError):
                    await subscription.unsubscribe()
                    await session.client.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{name}")

    # Messages that are not stored

    def publish(self, subject: str, data: bytes) -> None:
        """Send a message without waiting; without a connection it is lost."""
        self.start(self._publish(subject, data))

    async def _publish(self, subject: str, data: bytes) -> None:
        if self._session is not None and self._session.is_open:
            with suppress(driver.Error, OSError):
                await self._session.client.publish(subject, data)

    async def subscribe(self, subject: str, receive: Receive) -> None:
        """Receive the messages of a subject, also after a reconnect."""
        self._subscriptions[subject] = receive
        session = await self.connect()
        try:
            if subject not in session.subscriptions:
                await self._subscribe(session, subject, receive)
            await session.flush()
        except (driver.Error, OSError) as error:
            raise self._error(Unanswered, str(error) or type(error).__name__) from error

    async def _subscribe(self, session: _Session, subject: str, receive: Receive) -> None:
        async def on_message(message: Msg) -> None:
            receive(message.data, message.reply)

        session.subscriptions[subject] = await session.client.subscribe(subject, cb=on_message)

    async def unsubscribe(self, subject: str) -> None:
        """Receive no more messages of a subject."""
        self._subscriptions.pop(subject, None)
        session = self._session
        subscription = None if session is None else session.subscriptions.pop(subject, None)
        if session is not None and session.is_open and subscription is not None:
            with suppress(driver.Error, OSError):
                await subscription.unsubscribe()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Connecting

    async def connect(self) -> _Session:
        """The open connection, or a new one."""
        session = self._session
        if session is not None and session.is_open:
            return session
        async with self._connecting:
            # Another call may have connected while this one waited.
            if self._session is not None and self._session.is_open:
                return self._session
            self._check_open()
            self._session = session = await self._connect()
        self.sessions += 1
        self.on_connect()
        return session

    async def _connect(self) -> _Session:
        failure: StorageError | None = None
        servers = list(self._address.servers)
        # Begin with a random server: otherwise the first one would get all connections of a fleet.
        start = int(SYSTEM_CLOCK.random() * len(servers))
        for server in servers[start:] + servers[:start]:
            session = _Session()
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await session.connect(server, self._address, self._options(session))
                    for subject, receive in self._subscriptions.items():
                        await self._subscribe(session, subject, receive)
                    await session.flush()
                return session
            except TimeoutError:
                late = connect_timeout(_CONNECT_SECONDS, tls=self._address.tls is not None)
                failure = self._error(StorageError, str(late), server)
            except Exception as error:
                # Any exception: the driver passes on those of its parser and of the key libraries.
                failure = self._wrapped(error, server)
            except BaseException:
                await _abandon(session)
                raise
            await _abandon(session)
        assert failure is not None
        raise failure

    def _options(self, session: _Session) -> dict[str, Any]:
        address = self._address

        async def on_end() -> None:
            session.end(self._error(Unanswered, session.problem))
            # Not after an attempt to connect that has failed: each would begin another loop of attempts.
            is_lost = session is self._session
            if is_lost and self._subscriptions and not self._is_closed:
                self.start(self._reconnect())

        options: dict[str, Any] = {"closed_cb": on_end, "name": self._name}
        if address.user:
            options |= {"user": address.user, "password": address.password}
        if address.token:
            options["token"] = address.token
        if address.creds:
            options["user_credentials"] = address.creds
        if address.nkey:
            options["nkeys_seed"] = address.nkey
        return options

    async def _reconnect(self) -> None:
        failures = 0
        while not self._is_closed:
            try:
                await self.connect()
                return
            except StorageError:
                pause = backoff(
                    failures,
                    first=_FIRST_PAUSE,
                    longest=_LONGEST_PAUSE,
                    jitter=SYSTEM_CLOCK.random(),
                )
                failures += 1
                await SYSTEM_CLOCK.sleep(pause)

    async def close(self) -> None:
        """Disconnect for good."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        async with self._connecting:
            if self._session is not None:
                await _abandon(self._session)

    # Errors

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._error(StorageClosed, "this storage was closed during the call")

    def _wrapped(self, error: Exception, server: str) -> StorageError:
        if isinstance(error, StorageError):
            return error
        if isinstance(error, ImportError):
            raise SettingsError("creds= and nkey= need a package: pip install 'nats-py[nkeys]'")
        text = str(error) or type(error).__name__
        lowered = text.lower()
        if isinstance(error, driver.AuthorizationError) or "authorization" in lowered:
            return self._error(
                StorageRefused,
                f"{text}; give the right user and password, or creds=, in the URL",
                server,
            )
        if "secure connection required" in lowered or "tls" in lowered:
            return self._error(StorageRefused, f"{text}; add tls=true to the URL", server)
        if isinstance(error, driver.NoServersError | socket.gaierror):
            return self._error(StorageError, f"{text}; is the name of the host right?", server)
        return self._error(StorageError, text + network_advice(error), server)

    def _error(self, kind: type[_E], text: str, server: str = "") -> _E:
        for secret in self._address.secrets:
            text = text.replace(secret, "***")
        return kind(f"NATS at {server or ', '.join(self._address.servers)}: {text}")


_E = TypeVar("_E", bound=StorageError)


async def _abandon(session: _Session) -> None:
    with suppress(Exception):
        await session.client.close()
    session.end(StorageError(session.problem))


def _place_of(message: Msg) -> tuple[int, int]:
    """The sequence number of a consumer's message, and the number of messages after it."""
    # $JS.ACK.stream.consumer.delivered.sequence.…, or the same with domain and account behind ACK.
    parts = message.reply.split(".")
    shift = 0 if len(parts) == 9 else 2
    return int(parts[5 + shift]), int(parts[8 + shift])


class _Failure(msgspec.Struct):
    description: str = ""
    err_code: int = 0


class _Reply(msgspec.Struct):
    error: _Failure | None = None


class _Stored(msgspec.Struct):
    seq: int


class _Consumer(msgspec.Struct):
    num_pending: int = 0
