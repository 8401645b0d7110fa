"""The ASGI middleware that every request passes first.

It refuses unknown host names (DNS rebinding), methods other than GET and POST, changes that another
site requests (CSRF), and unauthenticated requests. It adds the same strict headers to every
response.
"""

from __future__ import annotations

import inspect
import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniq.dashboard.authentication import (
    Access,
    Authorize,
    Identity,
    Role,
    Session,
    Sessions,
    form_session,
    plain_name,
)
from omniq.dashboard.cookies import session_cookie, set_cookie
from omniq.dashboard.wrong_secrets import TooManyAttempts, WrongSecrets

MAX_BODY = 4 * 1024 * 1024

_MAX_ADDRESS = 64

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: browsers would then send `Origin: null` with forms of our own pages.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class User(NamedTuple):
    """The user of a request. A program that sends its secret with every request has no session.

    `actions` limits what the user may do; None: all that the role may.
    """

    role: Role
    session: Session | None
    name: str = ""
    actions: tuple[str, ...] | None = None

    @property
    def shown(self) -> str:
        """The user in the audit log: the name, if it is known, and the role.

        >>> User(Role.VIEWER, None).shown, User(Role.OPERATOR, None, "ada").shown
        ('viewer', 'ada (operator)')
        """
        return f"{self.name} ({self.role})" if self.name else str(self.role)


class AccessMiddleware:
    """Checks the host, the method, the origin and the user of every request."""

    def __init__(
        self, app: ASGIApp, access: Access, sessions: Sessions, wrong_secrets: WrongSecrets
    ) -> None:
        self._app = app
        self._access = access
        self._sessions = sessions
        self._wrong_secrets = wrong_secrets
        self._hosts = LOOPBACK | {host.lower() for host in access.hosts}
        self._proxies = [
            ipaddress.ip_network(proxy, strict=False) for proxy in access.trusted_proxies
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Until the user is known there is none: a page shows nothing to a request without a user.
        scope["omniq.user"] = None
        self._describe_client(scope)
        new_cookies: list[Session] = []
        refusal = self._check_request(scope) or await self._check_user(scope, new_cookies)
        send = _with_headers(send, scope, new_cookies)
        await (refusal or self._app)(scope, receive, send)

    def _describe_client(self, scope: Scope) -> None:
        """Find out the address of the browser, and whether it uses TLS."""
        headers = Headers(scope=scope)
        peer = scope.get("client")
        client = peer[0] if peer else "local"
        schemes = [scope["scheme"]]
        if self._is_proxy(client):
            schemes += headers.get("x-forwarded-proto", "").split(",")[-1:]
            # Each proxy appends the address that it has seen. What stands before those of the
            # trusted ones comes from the client, which may have written anything.
            for address in reversed(headers.get("x-forwarded-for", "").split(",")):
                if not self._is_proxy(client):
                    break
                client = address.strip() or client
        # A browser names its own page as the origin of a form: a proxy need not tell.
        origin = headers.get("origin", "").lower()
        scope["omniq.client"] = client[:_MAX_ADDRESS]
        scope["omniq.https"] = (
            self._access.https
            or origin.startswith("https://")
            or any(scheme.strip().lower() == "https" for scheme in schemes)
        )

    def _is_proxy(self, client: str) -> bool:
        try:
            address = ipaddress.ip_address(client)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)

    def _check_request(self, scope: Scope) -> Response | None:
        """The refusal of a request that no user may make; None if there is no objection."""
        headers = Headers(scope=scope)
        if _host_name(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("unknown host name: see `hosts` of Access", 403)
        if scope["method"] not in ("GET", "POST"):
            return PlainTextResponse("method not allowed", 405, {"allow": "GET, POST"})
        if scope["method"] == "POST":
            if not _is_from_own_page(headers, scope["scheme"]):
                return PlainTextResponse("another site requested this change", 403)
            if not _is_small(headers.get("content-length", "0")):
                return PlainTextResponse("the request is too large", 413)
        return None

    async def _check_user(self, scope: Scope, new_cookies: list[Session]) -> Response | None:
        """Authenticate the user. Without one, only the sign-in page and static files are served."""
        path = relative_path(scope)
        try:
            user = await self._authenticate(scope, new_cookies)
        except TooManyAttempts as error:
            return too_many_attempts(error)
        scope["omniq.user"] = user
        if user is not None or path == "/login" or path.startswith("/static/"):
            return None
        if path == "/api" or path.startswith("/api/"):
            return JSONResponse({"error": "sign in first"}, 401, {"www-authenticate": "Bearer"})
        if scope["method"] == "GET":
            query = scope.get("query_string", b"").decode("latin-1")
            scope["omniq.next"] = f"{path}?{query}" if query else path
        scope["path"], scope["raw_path"] = f"{scope.get('root_path', '')}/login", b""
        scope["omniq.unauthenticated"] = True
        return None

    async def _authenticate(self, scope: Scope, new_cookies: list[Session]) -> User | None:
        headers = Headers(scope=scope)
        kind, _, secret = headers.get("authorization", "").partition(" ")
        cookie = session_cookie(headers)
        if self._access.authorize is not None:
            known = await _ask(self._access.authorize, scope)
            if known is None:
                return None
            form = form_session(cookie, known.role)
            if form.cookie != cookie:
                new_cookies.append(form)
            return User(self._effective(known.role), form, plain_name(known.name), known.actions)
        if kind.lower() == "bearer":
            role = self._sessions.role_of(secret.strip())
            if role is None:
                await self._wrong_secrets.delay(client_of(scope))
                return None
            return User(self._effective(role), None)
        session = self._sessions.find(cookie)
        if session is None:
            return None
        return User(self._effective(session.role), session, session.name)

    def _effective(self, role: Role) -> Role:
        return Role.VIEWER if self._access.read_only else role


async def _ask(authorize: Authorize, scope: Scope) -> Identity | None:
    """The user that the application knows. Anything but a role or an identity refuses the request."""
    answer = authorize(scope)
    known = await answer if inspect.isawaitable(answer) else answer
    if isinstance(known, Role):
        return Identity(role=known)
    if known is None or isinstance(known, Identity):
        return known
    raise TypeError(
        f"authorize of Access returned {type(known).__name__}: expected a Role or an Identity, or None "
        "to refuse the request"
    )


def too_many_attempts(error: TooManyAttempts) -> Response:
    """The answer to a client that guesses secrets."""
    return JSONResponse({"error": str(error)}, 429, {"retry-after": str(int(error.seconds) + 1)})


def user_of(request: Request) -> User:
    """The user of the request, whom the middleware has authenticated."""
    user = request.scope.get("omniq.user")
    # Not an assert, which `python -O` removes.
    if not isinstance(user, User):
        raise HTTPException(401, "sign in first")
    return user


def client_of(scope: Scope) -> str:
    """The address of the browser or program that a request came from."""
    client: str = scope["omniq.client"]
    return client


def relative_path(scope: Scope) -> str:
    """The path below the path that the dashboard is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _host_name(host: str) -> str:
    """The name in a Host header, without the port; empty if the header is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_from_own_page(headers: Headers, scheme: str) -> bool:
    """Whether the request comes from a page of the dashboard, according to the browser."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None and site != "same-origin":
        return False
    if origin is None:
        return True
    # A proxy that terminates TLS forwards plain HTTP: the host must match, the scheme may differ.
    return origin.lower() in (f"{scheme}://{headers['host']}".lower(), f"https://{headers['host']}")


def _is_small(length: str) -> bool:
    return length.isascii() and length.isdigit() and len(length) < 12 and int(length) <= MAX_BODY


def _with_headers(send: Send, scope: Scope, new_sessions: list[Session]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            for session in new_sessions:
                response = Response()
                set_cookie(response, scope, session)
                headers.append("set-cookie", response.headers["set-cookie"])
        await send(message)

    return send_with_headers
