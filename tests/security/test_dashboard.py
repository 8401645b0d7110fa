"""The dashboard against unauthenticated users, other sites and hostile tasks: S11 to S20."""

from __future__ import annotations

import asyncio
import hmac
import re
from html.parser import HTMLParser

import httpx
import pytest
from loguru import logger
from starlette.routing import Route

from omniq import AsyncTaskQueue, log
from omniq.cli import main
from omniq.clock import to_micros
from omniq.dashboard import Access, create_app
from omniq.dashboard.authentication import Role, Sessions
from omniq.dashboard.live_stream import MAX_STREAMS
from omniq.errors import SettingsError
from omniq.models import Progress, TaskError
from omniq.outcomes import Failed
from omniq.storage.memory import MemoryStorage
from omniq.tasks.task_output import StoredChunk, encode_log
from omniq.testing.builders import an_output
from omniq.testing.clock import ManualClock
from tests.browser.served import SECRET, VIEWER, bearer, dashboard_client, served, sign_in
from tests.security.attacks import ATTACKS

# Some tests send a thousand requests.
pytestmark = pytest.mark.timeout(120)

TAGS = set(
    re.findall(
        r"\w+",
        """
        html head meta title link script body a header svg use symbol rect span nav div p form
        input button main section h1 h2 h3 ul ol li dl dt dd table thead tbody tr th td label
        select option datalist details summary pre code strong time figure figcaption path
        progress small br textarea dialog kbd
        """,
    )
)


PARAMETERS = {
    "/tasks": ("q", "function", "id", "since", "cursor", "queue", "metadata"),
    "/dead": ("function", "reason", "after", "group", "error"),
    "/tasks/matching": ("q",),
    "/dead/matching": ("group", "error", "function"),
    "/": ("range",),
    "/functions": ("range", "sort"),
    "/tasks/new": ("function",),
    "/audit": ("after",),
}


@pytest.fixture
async def queue():
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


@pytest.fixture
async def client(queue):
    async with dashboard_client(queue) as client:
        yield client


def routes_of(queue) -> list[tuple[str, str]]:
    """Every route of the dashboard, from the router, so that new routes are tested too."""
    app = create_app(queue, access=Access(operator=SECRET))
    found = []
    for route in app.routes:
        assert isinstance(route, Route)
        path = route.path.replace("{task_id}", "some-id").replace("{name}", "style.css")
        found += [(method, path) for method in (route.methods or set()) - {"HEAD"}]
    return found


# S11


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "db.example.org", ""])
def test_s11_no_other_machine_is_served_without_credentials(host, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["dashboard", "--host", host, "--port", "0"])
    printed = capsys.readouterr()

    assert exited.value.code not in (0, None)
    assert printed.out == ""
    assert "OMNIQ_DASHBOARD_OPERATOR" in printed.err
    assert printed.err.count("\n") == 1


def test_s11_a_short_secret_is_refused():
    with pytest.raises(SettingsError, match="too short"):
        Access(operator="hunter2")


async def test_s11_without_credentials_every_request_is_refused(queue):
    async with dashboard_client(queue, Access()) as client:
        responses = [await client.get("/"), await client.get("/api/overview")]
        tried = await client.post("/login", data={"secret": ""})

    assert [response.status_code for response in responses] == [401, 401]
    assert tried.status_code == 403


# S12


async def test_s12_unauthenticated_requests_reach_only_the_sign_in_page(queue, client):
    for method, path in routes_of(queue):
        answer = await client.request(method, path)
        allowed = path in ("/login",) or path.startswith("/static/")

        assert answer.status_code in (200, 403) if allowed else answer.status_code == 401, path


async def test_s12_no_route_responds_to_an_unknown_host_name(queue, client):
    for method, path in routes_of(queue):
        for host in ("evil.example", "127.0.0.1.evil.example", "[::1", "", "localhost@evil"):
            answer = await client.request(method, path, headers={**bearer(), "host": host})

            assert answer.status_code == 403, (method, path, host)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "HEAD", "TRACE", "OPTIONS", "BREW"])
async def test_s12_no_route_allows_another_method(queue, client, method):
    for _, path in routes_of(queue):
        answer = await client.request(method, path, headers=bearer())

        assert answer.status_code == 405, path


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_s12_no_change_is_made_for_another_site(queue, client, headers):
    for method, path in routes_of(queue):
        if method == "POST":
            answer = await client.post(path, headers={**bearer(), **headers})
            assert answer.status_code == 403, path


async def test_s12_no_change_is_made_without_the_session_token(queue, client):
    await sign_in(client)
    for method, path in routes_of(queue):
        if method == "POST" and path != "/login":
            for token in ("", "wrong"):
                answer = await client.post(
                    path, data={"token": token}, headers={"x-omniq-token": token}
                )
                assert answer.status_code == 403, path


async def test_s12_a_viewer_changes_nothing(queue, client):
    for method, path in routes_of(queue):
        if method == "POST" and path not in ("/login", "/logout"):
            answer = await client.post(path, headers=bearer(VIEWER))
            assert answer.status_code == 403, path


async def test_s12_get_requests_change_nothing(queue, client):
    await queue.options(task_id="some-id").enqueue("m.f")
    await queue.schedules.add("nightly", "m.f", cron="0 3 * * *")

    async def stored():
        return (
            await queue.list_tasks(),
            await queue.schedules.list(),
            await queue.storage.paused_queues(),
        )

    before = await stored()
    for _, path in routes_of(queue):
        if path != "/api/stream":
            await client.get(path, headers=bearer())

    assert await stored() == before


async def test_s12_an_endless_body_is_refused(client):
    async def endless():
        for _ in range(10_000):
            yield b"x" * 65_536

    answer = await client.post("/api/tasks/retry", content=endless(), headers=bearer())

    assert answer.status_code == 413


# S13


class Shape(HTMLParser):
    """The elements, event handlers and links that a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name.startswith("on") or name == "style":
                self.handlers.append(name)
            if name in ("href", "src", "action", "formaction"):
                self.links.append(value or "")


async def enqueue_attack(queue: AsyncTaskQueue, attack: str) -> str:
    """Put the attack into every field of a task, and fail it; returns the id of the task."""
    options = queue.options(metadata={attack: attack}, unique=attack, queue="attacked")
    handle = await options.enqueue("m.f", attack, [attack], word=attack, more={attack: attack})
    (task,) = await queue.storage.reserve(1, queues=("attacked",))
    report = Progress(task_id=task.id, token=task.token, fraction=0.5, message=attack)
    await queue.storage.report_progress([report])
    line = StoredChunk(0, encode_log(attack, "info", {attack: attack}))
    batch = an_output(task.id, task.token, attack, {attack: attack}, line)
    assert await queue.storage.append_output([batch]) == [True]
    error = TaskError(
        attack, error_type=attack[:40], traceback=attack, recovery_hint=attack, failed_step=attack
    )
    await queue.storage.record([Failed(task.id, task.token, error)])
    return handle.id


@pytest.mark.deep_on("25", "50", "75")
@pytest.mark.parametrize("start", range(0, len(ATTACKS), 25))
async def test_s13_an_attack_in_any_field_stays_text(queue, client, start):
    for attack in ATTACKS[start : start + 25]:
        task_id = await enqueue_attack(queue, attack)
        for path in (f"/tasks/{task_id}", "/", "/tasks", "/dead", "/limits", "/queues", "/audit"):
            shape = Shape((await client.get(path, headers=bearer())).text)

            assert shape.tags <= TAGS, (attack, path, shape.tags - TAGS)
            assert shape.handlers == [], (attack, path)
            assert all(link.startswith(("/", "#")) for link in shape.links), (attack, path)
        await queue.dead.delete(task_id)


@pytest.mark.deep_on("25", "50", "75")
@pytest.mark.parametrize("start", range(0, len(ATTACKS), 25))
async def test_s13_an_attack_in_a_query_stays_text(client, start):
    for attack in ATTACKS[start : start + 25]:
        for path, names in PARAMETERS.items():
            for name in names:
                answer = await client.get(path, params={name: attack}, headers=bearer())
                shape = Shape(answer.text)

                assert answer.status_code in (200, 400)
                assert shape.tags <= TAGS, (attack, name)
                assert all(link.startswith(("/", "#")) for link in shape.links), (attack, name)


async def test_s13_json_is_never_rendered_as_html(queue, client):
    task_id = await enqueue_attack(queue, "<script>alert(1)</script>")
    answer = await client.get(f"/api/tasks/{task_id}", headers=bearer())

    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


# S14


async def test_s14_every_response_has_the_same_strict_headers(queue, client):
    expected = {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
    }
    for path in ("/", "/login", "/tasks/none", "/api/overview", "/static/live.js", "/nowhere"):
        answer = await client.get(path, headers=bearer())
        shown = {name: answer.headers.get(name) for name in expected}

        assert shown == expected, path
        assert answer.headers["cache-control"] in ("no-store", "max-age=300")


async def test_s14_the_cookie_is_hidden_from_scripts_and_other_sites(client):
    answer = await client.post("/login", data={"secret": SECRET})
    cookie = answer.headers["set-cookie"].lower()

    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert "domain" not in cookie


async def test_s14_behind_tls_the_cookie_is_secure(queue):
    app = create_app(queue, access=Access(operator=SECRET))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="https://localhost") as client:
        answer = await client.post("/login", data={"secret": SECRET})

    assert "secure" in answer.headers["set-cookie"].lower()


# S15


async def test_s15_a_secret_argument_is_neither_shown_nor_logged(queue, client):
    canary = "canary-5f1c9e"
    lines: list[str] = []
    sink = logger.add(
        lambda message: lines.append(str(message)), level=0, format="{message}{extra}"
    )
    log.enable("TRACE")
    try:
        handle = await queue.options(metadata={"api_key": canary}).enqueue(
            "m.f", {"password": canary}, token=canary, nested={"Authorization": [canary]}
        )
        (task,) = await queue.storage.reserve(1)
        await queue.storage.record([Failed(task.id, task.token, TaskError("boom"))])
        await queue.schedules.add("s", "m.f", kwargs={"secret": canary}, cron="0 3 * * *")
        pages = [
            (await client.get(path, headers=bearer())).text
            for path in (
                f"/tasks/{handle.id}",
                f"/api/tasks/{handle.id}",
                "/api/tasks",
                "/api/schedules",
                "/schedules",
                "/schedules/s/edit",
                "/tasks",
                "/dead",
                "/api/dead",
            )
        ]
        await client.post(
            "/api/tasks/retry-edited",
            json={"id": handle.id, "kwargs": {"password": canary}, "bad": canary},
            headers=bearer(),
        )
        await client.post(
            "/api/tasks/retry-edited",
            json={"id": handle.id, "kwargs": {"password": canary}},
            headers=bearer(),
        )
    finally:
        log.disable()
        logger.remove(sink)

    assert not [page for page in pages if canary in page]
    assert "operator.acted" in "".join(lines)
    assert canary not in "".join(lines)
    assert SECRET not in "".join(lines)


def test_s15_no_repr_contains_a_secret():
    access = Access(operator=SECRET, viewer=VIEWER)
    session = Sessions(access, ManualClock()).begin(Role.OPERATOR)

    shown = f"{access!r}{session!r}{vars(access).keys()}"
    assert not {SECRET, VIEWER, session.cookie, session.token} & set(shown.split("'"))
    assert SECRET not in shown
    assert session.token not in shown
    assert session.cookie not in shown


# S17


def test_s17_secrets_are_compared_in_constant_time(monkeypatch):
    compared: list[tuple[int, int]] = []
    original = hmac.compare_digest

    def recording(one, other):
        compared.append((len(one), len(other)))
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", recording)
    sessions = Sessions(Access(operator=SECRET, viewer=VIEWER), ManualClock())
    roles = [sessions.role_of(guess) for guess in (SECRET[:-1] + "x", "y", SECRET, VIEWER)]

    assert roles == [None, None, Role.OPERATOR, Role.VIEWER]
    # All three secrets, and equal lengths: timing reveals neither a prefix nor the length.
    assert compared == [(32, 32)] * 12


# S18


async def test_s18_wrong_secrets_of_a_client_wait_and_the_right_one_does_not():
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        dashboard_client(queue) as client,
    ):
        attempts = [await client.post("/login", data={"secret": "wrong"}) for _ in range(5)]
        sixth = asyncio.create_task(client.post("/login", data={"secret": "wrong"}))
        right = await client.post("/login", data={"secret": SECRET})
        by_header = await client.get("/api/overview", headers=bearer())
        waits = not sixth.done()
        while not sixth.done():
            clock.advance(1)
            await asyncio.sleep(0)
        clock.advance(61)
        later = await client.post("/login", data={"secret": "wrong"})

    assert [answer.status_code for answer in attempts] == [403] * 5
    assert (right.status_code, by_header.status_code) == (303, 200)
    assert waits
    assert (await sixth).status_code == 429
    assert int((await sixth).headers["retry-after"]) >= 1
    assert later.status_code == 403


async def test_s18_a_link_works_once_and_wrong_tokens_are_limited(queue):
    async with dashboard_client(queue, Access()) as client:
        sessions = client.app.state.dashboard.sessions
        first, link = sessions.new_link(), sessions.new_link()
        opened = [await client.get("/login", params={"token": token}) for token in (first, link)]
        client.cookies.clear()
        again = await client.get("/login", params={"token": link})
        more = [await client.get("/login", params={"token": "x"}) for _ in range(5)]

    assert [answer.status_code for answer in opened] == [403, 303]
    assert again.status_code == 403
    assert more[-1].status_code == 429


async def test_s18_a_session_expires_and_ends_at_sign_out(queue):
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        dashboard_client(queue) as client,
    ):
        token = await sign_in(client)
        inside = await client.get("/")
        clock.advance(13 * 3600)
        outside = await client.get("/")
        await sign_in(client)
        token = (await client.get("/")).text.split('name="token" value="')[1].split('"')[0]
        await client.post("/logout", data={"token": token})
        after = await client.get("/")

    assert (inside.status_code, outside.status_code, after.status_code) == (200, 401, 401)
    assert to_micros(clock.now()) > 0


# S19


@pytest.mark.parametrize(
    "name",
    [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "..\\app.py",
        "/etc/passwd",
        "style.css/../../app.py",
        "style.css%00.png",
        ".",
        "templates",
        "STYLE.CSS",
    ],
)
async def test_s19_only_listed_static_files_are_served(client, name):
    answer = await client.get(f"/static/{name}", headers=bearer())

    assert answer.status_code == 404
    assert "import" not in answer.text


# S20


@pytest.mark.timeout(120)
async def test_s20_the_number_of_live_streams_is_limited_and_closed_ones_are_freed(queue):
    limits = httpx.Limits(max_connections=MAX_STREAMS + 5)
    async with served(queue) as (address, app), httpx.AsyncClient(limits=limits) as client:
        streams = [await open_stream(client, address) for _ in range(MAX_STREAMS)]
        full = app.state.dashboard.sampler.watchers
        refused = await client.get(f"{address}/api/stream", headers=bearer())
        answer, _ = streams.pop()
        await answer.aclose()
        while app.state.dashboard.sampler.watchers == full:
            # Each request lets the server's event loop run, so that it notices the closed stream.
            await client.get(f"{address}/api/overview", headers=bearer())
        streams.append(await open_stream(client, address))
        again = streams[-1][0].status_code
        for answer, _ in streams:
            await answer.aclose()

    assert full == MAX_STREAMS
    assert (refused.status_code, again) == (503, 200)


async def open_stream(client, address):
    """A live stream that has sent its first event, and the iterator over its lines."""
    request = client.build_request("GET", f"{address}/api/stream", headers=bearer())
    answer = await client.send(request, stream=True)
    lines = answer.aiter_lines()
    while not (await anext(lines)).startswith("data:"):
        pass
    # The caller keeps the iterator: the stream closes when it is garbage collected.
    return answer, lines
