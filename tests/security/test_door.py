"""Who gets in, and what the others see: the dashboard, the endpoints of a worker, screens and logs."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import httpx
import pytest
import uvicorn
from loguru import logger

from omniq import AsyncTaskQueue, log
from omniq.dashboard import Access, Role, create_app
from omniq.dashboard.authentication import LINK_SECONDS, Sessions
from omniq.dashboard.connections import ConnectionLimits
from omniq.errors import SettingsError
from omniq.events import Dispatcher, OperatorActed, TaskStarted
from omniq.integrations.endpoint import is_known_host
from omniq.models import TaskError
from omniq.operations.redaction import redacted
from omniq.outcomes import Failed
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage
from omniq.text.masking import is_secret_name, mask_text, mask_url
from tests.browser.served import SECRET, VIEWER, Client, bearer, dashboard_client
from tests.security.test_dashboard import routes_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def queue():
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


# S51: what `authorize` may return

ANSWERS: list[Any] = [
    None, False, True, 0, 1, "", "operator", "viewer", "OPERATOR", b"operator", [], ["operator"], {},
    {"role": "operator"}, object(), Role, Exception("no"), NotImplemented, ..., 1.5, ("operator",),
]  # fmt: skip


def asynchronous(answer: Any) -> Any:
    async def authorize(scope: Any) -> Any:
        await asyncio.sleep(0)
        return answer

    return authorize


def synchronous(answer: Any) -> Any:
    return lambda scope: answer


@pytest.mark.security("S51")
@pytest.mark.parametrize(
    ("wrap", "answer"),
    [
        *((synchronous, answer) for answer in ANSWERS),
        *((asynchronous, answer) for answer in (None, True, "operator")),
        *(pytest.param(asynchronous, answer, marks=pytest.mark.deep) for answer in ANSWERS),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
async def test_only_a_role_lets_a_request_in(queue, answer, wrap):
    async with dashboard_client(queue, Access(authorize=wrap(answer))) as client:
        for method, path in routes_of(queue):
            code = (await client.request(method, path)).status_code
            is_public = path == "/login" or path.startswith("/static/")

            assert code in ((401, 500) if not is_public else (200, 403, 500)), path


@pytest.mark.security("S51")
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("wrap", [synchronous, asynchronous])
async def test_a_role_is_admitted_from_functions_and_coroutines(queue, role, wrap):
    async with dashboard_client(queue, Access(authorize=wrap(role))) as client:
        read = await client.get("/queues")
        token = re.search(r'name="token" value="(\w+)"', read.text)
        changed = await client.post(
            "/api/queues/pause", json={"queue": "q"}, headers={"x-omniq-token": token[1]}  # type: ignore[index]
        )  # fmt: skip

    assert read.status_code == 200
    assert changed.status_code == (200 if role is Role.OPERATOR else 403)


@pytest.mark.security("S51")
@pytest.mark.parametrize("error", [RuntimeError("database down"), KeyError("user")])
async def test_an_authorize_that_fails_lets_no_request_in(queue, error):
    def authorize(scope: Any) -> Role:
        raise error

    async with dashboard_client(queue, Access(authorize=authorize)) as client:
        answer = await client.get("/")

    assert answer.status_code == 500
    assert str(error) not in answer.text


@pytest.mark.security("S51")
async def test_forms_of_an_authorized_user_work_in_every_process(queue):
    """The page comes from one process of the application, and the form reaches another."""
    access = Access(authorize=lambda scope: Role.OPERATOR)
    async with dashboard_client(queue, access) as one, dashboard_client(queue, access) as other:
        page = (await one.get("/queues")).text
        token = page.split('name="token" value="')[1].split('"')[0]
        headers = {"cookie": f"omniq_session={one.cookies['omniq_session']}"}
        changed = await other.post(
            "/act/queues/pause", data={"token": token, "queue": "q"}, headers=headers
        )
        forged = await other.post("/act/queues/pause", data={"token": token, "queue": "q"})

    assert (changed.status_code, forged.status_code) == (303, 403)


# S52: the right secret always gets in


def from_address(client: Client, address: str) -> httpx.AsyncClient:
    """A client of the same dashboard at another address."""
    transport = httpx.ASGITransport(app=client.app, client=(address, 1), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8484")


@pytest.mark.security("S52")
async def test_a_flood_of_wrong_secrets_shuts_out_neither_the_right_one_nor_other_clients(queue):
    async with dashboard_client(queue) as client, from_address(client, "192.0.2.9") as other:
        guesses = [
            asyncio.ensure_future(client.post("/login", data={"secret": f"guess {number}"}))
            for number in range(300)
        ]
        guesses += [
            asyncio.ensure_future(client.get("/", headers=bearer(f"x{n}"))) for n in range(300)
        ]
        await asyncio.sleep(0.2)
        right = await client.post("/login", data={"secret": SECRET})
        program = await client.get("/api/overview", headers=bearer(VIEWER))
        elsewhere = await other.post("/login", data={"secret": "wrong"})
        codes = [(await asyncio.wait_for(guess, 60)).status_code for guess in guesses]

    assert (right.status_code, program.status_code) == (303, 200)
    assert elsewhere.status_code == 403
    assert codes.count(429) >= 590


@pytest.mark.security("S52")
@pytest.mark.parametrize(
    ("peer", "forwarded", "others_wait"),
    [
        ("10.0.0.1", "192.0.2.1", False),
        ("10.0.0.1", "203.0.113.5, 192.0.2.1, 10.0.0.2", False),
        ("192.0.2.77", "192.0.2.1", True),
    ],
)
async def test_behind_a_trusted_proxy_each_browser_is_a_client(queue, peer, forwarded, others_wait):
    """A browser elsewhere waits only if the proxy is not trusted: then all seem to be one client."""
    access = Access(operator=SECRET, trusted_proxies=("10.0.0.0/8",))
    async with dashboard_client(queue, access) as client, from_address(client, peer) as proxy:
        headers = {"x-forwarded-for": forwarded}
        for _ in range(6):
            guilty = await proxy.post("/login", data={"secret": "wrong"}, headers=headers)
        headers = {"x-forwarded-for": "192.0.2.2"}
        innocent = await proxy.post("/login", data={"secret": "wrong"}, headers=headers)

    assert guilty.status_code == 429
    assert innocent.status_code == (429 if others_wait else 403)


@pytest.mark.security("S52")
async def test_a_client_cannot_escape_by_forwarded_addresses_that_it_writes_itself(queue):
    """Behind a trusted proxy only what the proxy appended counts; without one, nothing does."""
    access = Access(operator=SECRET, trusted_proxies=("10.0.0.1",))
    async with dashboard_client(queue, access) as client:
        for peer, pattern in (
            ("192.0.2.1", "198.51.100.{}"),
            ("10.0.0.1", "198.51.100.{}, 192.0.2.5"),
        ):
            async with from_address(client, peer) as attacker:
                codes = [
                    (
                        await attacker.post(
                            "/login",
                            data={"secret": "wrong"},
                            headers={"x-forwarded-for": pattern.format(number)},
                        )
                    ).status_code
                    for number in range(7)
                ]
            assert codes == [403] * 5 + [429] * 2


@pytest.mark.security("S52")
@pytest.mark.parametrize("proxy", ["", "example.org", "10.0.0.0/99", "*"])
def test_a_trusted_proxy_is_an_address_or_a_network(proxy):
    with pytest.raises(SettingsError, match="trusted proxy"):
        Access(operator=SECRET, trusted_proxies=(proxy,))


# S53: one-time links; tests/browser/test_command.py has the terminal


@pytest.mark.security("S53")
async def test_a_link_expires_after_ten_minutes_and_works_once():
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        dashboard_client(queue, Access()) as client,
    ):
        sessions = client.app.state.dashboard.sessions
        late = sessions.new_link()
        clock.advance(LINK_SECONDS)
        expired = await client.get("/login", params={"token": late})
        link = sessions.new_link()
        clock.advance(LINK_SECONDS - 1)
        opened = await client.get("/login", params={"token": link})
        again = await client.get("/login", params={"token": link})

    assert LINK_SECONDS == 600
    assert [each.status_code for each in (expired, opened, again)] == [403, 303, 403]


# S54: sessions that no process stores


@pytest.mark.security("S54")
async def test_a_session_is_valid_in_other_processes_and_after_a_restart(queue):
    access = Access(operator=SECRET, viewer=VIEWER)
    async with dashboard_client(queue, access) as one:
        await one.post("/login", data={"secret": SECRET})
        cookie = one.cookies["omniq_session"]
        token = (await one.get("/queues")).text.split('name="token" value="')[1].split('"')[0]
    async with dashboard_client(queue, access) as other:
        changed = await other.post(
            "/act/queues/pause",
            data={"token": token, "queue": "q"},
            headers={"cookie": f"omniq_session={cookie}"},
        )

    assert changed.status_code == 303


@pytest.mark.security("S54")
async def test_a_session_ends_when_its_secret_is_replaced(queue):
    sessions = Sessions(Access(operator=SECRET, viewer=VIEWER), ManualClock())
    operator, viewer = sessions.begin(Role.OPERATOR), sessions.begin(Role.VIEWER)
    later = Sessions(Access(operator="another secret", viewer=VIEWER), ManualClock())

    assert later.find(operator.cookie) is None
    assert later.find(viewer.cookie) == viewer


@pytest.mark.security("S54")
def test_no_change_of_a_cookie_is_accepted():
    """Every character replaced, every part removed, doubled or taken from another session."""
    sessions = Sessions(Access(operator=SECRET, viewer=VIEWER), ManualClock())
    mine, theirs = sessions.begin(Role.VIEWER), sessions.begin(Role.OPERATOR)
    stranger = Sessions(Access(operator="guessed secret", viewer=VIEWER), ManualClock())
    forged = {stranger.begin(Role.OPERATOR).cookie, "", ".", "...", "operator...", "form.x"}
    for place, character in product(range(len(mine.cookie)), "0aZ.-_="):
        forged.add(mine.cookie[:place] + character + mine.cookie[place + 1 :])
        forged.add(mine.cookie[:place] + character + mine.cookie[place:])
    forged |= {mine.cookie[:place] for place in range(len(mine.cookie))}
    parts = [mine.cookie.split("."), theirs.cookie.split(".")]
    forged |= {
        ".".join(parts[source][place] for place, source in enumerate(sources))
        for sources in product((0, 1), repeat=4)
    }
    forged -= {mine.cookie, theirs.cookie}

    assert [cookie for cookie in forged if sessions.find(cookie) is not None] == []
    assert sessions.find(mine.cookie) == mine


@pytest.mark.security("S54")
def test_the_tokens_of_two_sessions_and_of_two_processes_without_secrets_differ():
    one, other = Sessions(Access(), ManualClock()), Sessions(Access(), ManualClock())
    first, second = one.begin(Role.OPERATOR), one.begin(Role.OPERATOR)

    assert first.token != second.token
    assert other.find(first.cookie) is None


# S55: cookies and the way back after the sign-in


@pytest.mark.security("S55")
@pytest.mark.parametrize(
    ("access", "headers"),
    [
        (Access(operator=SECRET, https=True), {}),
        (Access(operator=SECRET), {"origin": "https://localhost:8484"}),
        (
            Access(operator=SECRET, trusted_proxies=("127.0.0.1",)),
            {"x-forwarded-proto": "https"},
        ),
    ],
)
async def test_behind_tls_the_cookie_is_secure_and_bound_to_the_host(queue, access, headers):
    async with dashboard_client(queue, access) as client:
        answer = await client.post("/login", data={"secret": SECRET}, headers=headers)
        cookie = answer.headers["set-cookie"]
        name, _, value = cookie.partition(";")[0].partition("=")
        inside = await client.get("/", headers={"cookie": f"{name}={value}"})

    assert name == "__Host-omniq_session"
    assert {"Secure", "HttpOnly", "SameSite=lax", "Path=/"} <= set(cookie.split("; "))
    assert inside.status_code == 200


@pytest.mark.security("S55")
async def test_a_forwarded_scheme_counts_only_from_a_trusted_proxy(queue):
    async with dashboard_client(queue, Access(operator=SECRET)) as client:
        headers = {"x-forwarded-proto": "https"}
        answer = await client.post("/login", data={"secret": SECRET}, headers=headers)

    assert "Secure" not in answer.headers["set-cookie"]


@pytest.mark.security("S55")
async def test_after_the_sign_in_the_page_opens_that_was_asked_for(queue):
    async with dashboard_client(queue) as client:
        asked = await client.get("/tasks?status=failed&queue=mail")
        path = re.search(r'name="next" value="([^"]*)"', asked.text)
        assert path is not None
        form = {"secret": SECRET, "next": path[1].replace("&amp;", "&")}
        signed = await client.post("/login", data=form)

    assert asked.status_code == 401
    assert signed.headers["location"] == "/tasks?status=failed&queue=mail"


ELSEWHERE = [
    start + rest
    for start in ("//", "/\\", "\\\\", "https://", "http:", "javascript:", "/\t/", "/\n/", " //",
                  "\\/", "///", "/%0a//", "data:", "evil.example//", "/login?token=", "/logout#")
    for rest in ("evil.example", "evil.example/%2e%2e", "@evil.example")
]  # fmt: skip


@pytest.mark.security("S55")
@pytest.mark.parametrize("prefix", ["", "/ops/queue"])
async def test_no_sign_in_leads_to_another_site(queue, prefix):
    from starlette.applications import Starlette
    from starlette.routing import Mount

    inner = create_app(queue, access=Access(operator=SECRET))
    outer = Starlette(routes=[Mount(prefix, inner)]) if prefix else inner
    transport = httpx.ASGITransport(app=outer)
    base = "http://localhost:8484"
    async with httpx.AsyncClient(transport=transport, base_url=base) as client:
        for path in ELSEWHERE:
            form = {"secret": SECRET, "next": path}
            answer = await client.post(f"{prefix}/login", data=form)
            target = httpx.URL(base).join(answer.headers["location"])

            assert answer.status_code == 303
            assert (target.host, target.scheme) == ("localhost", "http"), path
            assert str(target.path).startswith(prefix + "/"), path
            assert "login" not in target.path, path
    await inner.state.dashboard.sampler.close()


# S56: what a stranger sees


@pytest.mark.security("S56")
@pytest.mark.parametrize(
    "access", [Access(operator=SECRET), Access(), Access(authorize=lambda s: None)]
)
async def test_a_stranger_sees_no_navigation_no_count_no_storage_and_no_error(access):
    storage = FaultyStorage(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue, dashboard_client(queue, access) as client:
        state = client.app.state.dashboard
        for number in range(7):
            await queue.options(queue="canary-queue").enqueue(f"canary.function{number}")
        await state.sampler.current()
        healthy = await every_answer(queue, client)
        storage.fail("read", times=None)
        while not state.sampler.error:
            state.sampler.invalidate()
            await state.sampler.current()
        broken = await every_answer(queue, client)

    for text in healthy + broken:
        assert "<nav" not in text
        assert "live.js" not in text
        assert not re.search(
            r"canary|memory|does not respond|Dead letters|Workers|class=.count", text
        )


async def every_answer(queue: AsyncTaskQueue, client: Client) -> list[str]:
    """The answers of all routes, and of a path that does not exist, without static files."""
    return [
        (await client.request(method, path)).text
        for method, path in [*routes_of(queue), ("GET", "/nowhere")]
        if not path.startswith("/static/")
    ]


@pytest.mark.security("S56")
async def test_a_handler_without_a_user_refuses_also_when_asserts_are_removed():
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    from omniq.dashboard.middleware import user_of

    for user in (None, "operator", object()):
        with pytest.raises(HTTPException):
            user_of(Request({"type": "http", "headers": [], "omniq.user": user}))


# S57: connections that send nothing


@asynccontextmanager
async def server_with(queue: AsyncTaskQueue, limits: ConnectionLimits) -> AsyncIterator[int]:
    app = create_app(queue, access=Access(operator=SECRET))
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=limits.protocol, log_config=None, timeout_graceful_shutdown=1  # type: ignore[arg-type]
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        await app.state.dashboard.sampler.close()
        listener.close()


async def is_served(port: int) -> bool:
    async with httpx.AsyncClient(timeout=20) as client:
        try:
            answer = await client.get(f"http://127.0.0.1:{port}/api/overview", headers=bearer())
        except httpx.TransportError:
            return False
        return answer.status_code == 200


BEGINNINGS = [
    b"",
    b"G",
    b"GET / HTTP/1.1\r\nHost: x\r\n",
    b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nsecret=",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET",
]


@pytest.mark.security("S57")
@pytest.mark.parametrize("beginning", BEGINNINGS)
async def test_an_unfinished_request_is_closed_in_time(queue, beginning):
    async with server_with(queue, ConnectionLimits(read_seconds=0.3)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        await asyncio.wait_for(reader.read(), 20)
        writer.close()


@pytest.mark.security("S57")
async def test_a_request_that_comes_byte_by_byte_is_closed_in_time(queue):
    async with server_with(queue, ConnectionLimits(read_seconds=0.5)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        closed = asyncio.ensure_future(reader.read())
        sent = 0
        for byte in b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000:
            writer.write(bytes([byte]))
            sent += 1
            await asyncio.wait([closed], timeout=0.05)
            if closed.done():
                break
        writer.close()

    assert sent < 1_000


@pytest.mark.security("S57")
async def test_idle_connections_do_not_shut_out_others(queue):
    """As many as the server accepts, of one client and of many."""
    limits = ConnectionLimits(maximum=20, read_seconds=60)
    async with server_with(queue, limits) as port:
        idle = []
        for number in range(60):
            address = "127.0.0.1" if number < 30 else f"127.0.1.{number}"
            idle.append(await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))
        served = [await is_served(port) for _ in range(5)]
        for _, writer in idle:
            writer.close()

    assert all(served[1:]), served
    assert sum(served) >= 4


@pytest.mark.security("S57")
async def test_a_closed_connection_makes_room_again(queue):
    limits = ConnectionLimits(maximum=10, read_seconds=60)
    async with server_with(queue, limits) as port:
        for _ in range(30):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await writer.wait_closed()
        served = await is_served(port)

    assert served
    assert limits._by_client.total() <= 1


# S58: host names of the endpoints of a worker

ADDRESSES = [
    "127.0.0.1",
    "10.2.3.4",
    "192.0.2.1",
    "[::1]",
    "[2001:db8::7]",
    "localhost",
    "LOCALHOST",
]
NAMES = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example",
    "2130706433", "0x7f000001", "127.1", "", " ", "[::1", "::1]", "worker.evil", "xlocalhost", "a/b",
]  # fmt: skip


@pytest.mark.security("S58")
@pytest.mark.parametrize("port", ["", ":9000"])
def test_addresses_and_localhost_are_known_hosts_and_names_only_when_allowed(port):
    known = [host for host in ADDRESSES + NAMES if is_known_host(host + port, {"worker"})]

    assert known == ADDRESSES
    assert is_known_host(f"Worker{port}", {"worker"})
    assert is_known_host(None, ())


@pytest.mark.security("S58")
def test_the_endpoints_refuse_names_and_say_nothing_about_the_storage():
    from http.server import ThreadingHTTPServer

    from omniq.integrations import endpoint

    reply = (200, "text/plain", b"a metric\n")
    paths = ("/metrics", "/ready", "/scale", "/health")
    handler = endpoint._handler(dict.fromkeys(paths, lambda: reply), {"worker"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        codes = {
            (path, host): fetch(server.server_port, path, host)
            for path in paths
            for host in ("evil.example", "worker:1", "10.0.0.1", "localhost")
        }
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

    refused = {key for key, (code, _) in codes.items() if code == 403}
    assert refused == {(path, "evil.example") for path in paths if path != "/health"}
    assert all("a metric" not in text for key, (code, text) in codes.items() if code == 403)


def fetch(port: int, path: str, host: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# S59: hidden values, and how long hiding takes

SECRET_WORDS = (
    "pwd pass auth bearer jwt otp dsn pin cvv iban ssn password passwd passphrase secret token "
    "authorization credential cookie"
)
SECRET_NAMES = (
    "api_key ssh_key private_key access_key encryption_key stripe_key webhook_url session_id "
    "card_number"
)
PLAIN_NAMES = [
    "user",
    "name",
    "author",
    "spinner",
    "compass",
    "passenger",
    "monkey",
    "keyboard",
    "primary_key",
    "sort_key",
    "tokyo",
    "design",
    "pinned",
    "opinion",
    "happy",
    "key",
    "id",
    "bypass",
    "index_key",
]


def spellings(name: str) -> set[str]:
    parts = name.split("_")
    camel = parts[0] + "".join(part.title() for part in parts[1:])
    return {name, name.upper(), name.replace("_", "-"), camel, camel[0].upper() + camel[1:],
            f"user_{name}", f"{name}_2", f"{name}2", f"my.{name}", f"X-{name.replace('_', '-')}",
            f"user{camel[0].upper()}{camel[1:]}", f"old_{name}_value"}  # fmt: skip


@pytest.mark.security("S59")
def test_secrets_are_known_by_each_part_of_a_name_in_any_spelling():
    words = [*SECRET_WORDS.split(), *SECRET_NAMES.split()]
    missed = [each for word in words for each in spellings(word) if not is_secret_name(each)]

    assert missed == []
    assert [name for name in PLAIN_NAMES if is_secret_name(name)] == []


@pytest.mark.security("S59")
@pytest.mark.parametrize(
    "value",
    [
        {"pwd": "CANARY"},
        {"cards": [{"card_cvv": "CANARY"}]},
        {"https://CANARY@host/path"},
        frozenset({"postgresql://me:CANARY@host"}),
        b"postgresql://me:CANARY@host",
        bytearray(b"Password=CANARY;"),
        "Server=db;User Id=me;Password=CANARY;Timeout=5",
        "host=db password=CANARY dbname=x",
        "host=db password='CAN CANARY' dbname=x",
        "https://CANARY@github.example/x.git",
        "redis:me:CANARY@host",
        ("https://hooks.example/?key=CANARY",),
        {1: {2: {"userPin": "CANARY"}}},
    ],
    ids=repr,
)
def test_no_kind_of_value_shows_a_secret(value):
    assert "CANARY" not in repr(redacted(value))


@pytest.mark.security("S59")
@pytest.mark.parametrize("name", ["api_key", "userPin", " token ", "Password"])
async def test_a_hidden_value_cannot_be_guessed_by_a_filter(queue, name):
    await queue.options(metadata={name.strip(): "right"}).enqueue("m.f")
    async with dashboard_client(queue) as client:
        answers = [
            await client.get(path, params={"metadata": f"{name}={guess}"}, headers=bearer(VIEWER))
            for path in ("/tasks", "/api/tasks")
            for guess in ("right", "wrong")
        ]

    assert {answer.status_code for answer in answers} == {400}
    assert answers[2].text == answers[3].text


TEETH = ["?key", "&key=", "://", "://a:", "=", "key=", "@", "a:@", " = ", "pass =", "A", "aB", "_", "';",
         '="', "x://", ";", "%", "password='", "&&", "\n", "\x00", "é", "redis:", "http:"]  # fmt: skip


@pytest.mark.security("S59")
@pytest.mark.parametrize("tooth", TEETH)
@pytest.mark.parametrize("start", ["", "://", "://@", "redis:"])
def test_hiding_takes_time_in_proportion_to_the_text(tooth, start):
    """Ten times the text takes about ten times as long; a quadratic pattern takes a hundred times."""
    clock = time.process_time
    seconds = []
    for size in (20_000, 200_000):
        text = start + tooth * (size // len(tooth)) + "@!"
        began = clock()
        mask_text(text)
        mask_url(text)
        is_secret_name(text)
        redacted({text: text})
        seconds.append(clock() - began)

    assert seconds[1] < 40 * max(seconds[0], 0.01)


# S60: log lines in the sinks of an application

HOSTILE = [
    chr(code) for code in (*range(32), *range(127, 160), 0x2028, 0x2029, 0x202E, 0x200B, 0xFEFF)
]


@pytest.mark.security("S60")
def test_no_field_of_an_event_begins_a_line_or_moves_the_cursor_in_any_sink():
    texts: list[str] = []
    values: list[Any] = []
    sinks = [
        logger.add(lambda message: texts.append(str(message)), format="{message} {extra}"),
        logger.add(lambda message: texts.append(str(message)), format="{extra[func_path]}|{message}",
                   filter=lambda record: "func_path" in record["extra"]),
        logger.add(lambda message: values.extend(message.record["extra"].values())),
    ]  # fmt: skip
    dispatcher = Dispatcher()
    log.enable("TRACE")
    try:
        log.attach(dispatcher)
        for character in HOSTILE:
            text = f"a{character}2026-01-01 INFO task.succeeded id=forged"
            dispatcher.emit(TaskStarted(id=text, func_path=text, queue=text, attempt=1))
            dispatcher.emit(
                OperatorActed(action=text, subject=text, outcome=text, by=text, client=text)
            )
    finally:
        log.disable()
        for sink in sinks:
            logger.remove(sink)

    assert len(texts) == 3 * len(HOSTILE)
    shown = [text.removesuffix("\n") for text in texts] + [
        each for each in values if isinstance(each, str)
    ]
    assert [text for text in shown if not text.isprintable()] == []


@pytest.mark.security("S60")
async def test_a_stored_function_name_cannot_forge_a_line_of_the_log():
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level=0, format="{message}")
    log.enable("TRACE")
    try:
        async with AsyncTaskQueue("memory://") as queue:
            await queue.enqueue("m.f", "x")
            (task,) = await queue.storage.reserve(1)
            error = TaskError("boom\nINFO forged", error_type="Boom\x1b[2J")
            await queue.storage.record([Failed(task.id, task.token, error)])
    finally:
        log.disable()
        logger.remove(sink)

    assert all(line.rstrip("\n").isprintable() for line in lines)
