"""The ASGI middleware that every request passes first.

It refuses unknown host names (DNS rebinding), methods other than GET and POST, changes that another
site requests (CSRF), and unauthenticated requests. It adds the same strict headers to every
response.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniq.dashboard.authentication import Access, Role, Session, Sessions, TooManyAttempts

COOKIE = "omniq_session"
MAX_BODY = 4 * 1024 * 1024

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
    """The user of a request. A program that sends its secret with every request has no session."""

    role: Role
    session: Session | None


class AccessMiddleware:
    """Checks the host, the method, the origin and the user of every request."""

    def __init__(self, app: ASGIApp, access: Access, sessions: Sessions) -> None:
        self._app = app
        self._access = access
        self._sessions = sessions
        self._hosts = LOOPBACK | {host.lower() for host in access.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        new_sessions: list[Session] = []
        refusal = self._check_request(scope) or self._check_user(scope, new_sessions)
        send = _with_headers(send, scope, new_sessions)
        await (refusal or self._app)(scope, receive, send)

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

    def _check_user(self, scope: Scope, new_sessions: list[Session]) -> Response | None:
        """Authenticate the user. Without one, only the sign-in page and static files are served."""
        path = relative_path(scope)
        try:
            user = self._authenticate(scope, new_sessions)
        except TooManyAttempts as error:
            return JSONResponse(
                {"error": str(error)}, 429, {"retry-after": str(int(error.seconds) + 1)}
            )
        scope["omniq.user"] = user
        if user is not None or path == "/login" or path.startswith("/static/"):
            return None
        if path == "/api" or path.startswith("/api/"):
            return JSONResponse({"error": "sign in first"}, 401, {"www-authenticate": "Bearer"})
        scope["path"], scope["raw_path"] = f"{scope.get('root_path', '')}/login", b""
        scope["omniq.unauthenticated"] = True
        return None

    def _authenticate(self, scope: Scope, new_sessions: list[Session]) -> User | None:
        headers = Headers(scope=scope)
        kind, _, secret = headers.get("authorization", "").partition(" ")
        session = self._sessions.find(_cookie(headers.get("cookie", "")))
        if self._access.authorize is not None:
            role = self._access.authorize(scope)
            if role is None:
                return None
            if session is None:
                session = self._sessions.begin(role)
                new_sessions.append(session)
            return User(self._effective(role), session)
        if kind.lower() == "bearer":
            role = self._sessions.role_of(secret.strip(), client_of(scope))
            return None if role is None else User(self._effective(role), None)
        return None if session is None else User(self._effective(session.role), session)

    def _effective(self, role: Role) -> Role:
        return Role.VIEWER if self._access.read_only else role


def user_of(request: Request) -> User:
    """The user of the request, whom the middleware has authenticated."""
    user = request.scope["omniq.user"]
    assert isinstance(user, User)
    return user


def set_cookie(response: Response, scope: Scope, session: Session) -> None:
    """Set the session cookie: sent to this site only, and not readable by scripts."""
    response.set_cookie(
        COOKIE,
        session.id,
        path=_cookie_path(scope),
        secure=scope["scheme"] == "https",
        httponly=True,
        samesite="strict",
    )


def delete_cookie(response: Response, scope: Scope) -> None:
    """Delete the session cookie."""
    response.delete_cookie(COOKIE, path=_cookie_path(scope), httponly=True, samesite="strict")


def client_of(scope: Scope) -> str:
    """The address that a request came from."""
    client = scope.get("client")
    return client[0] if client else "local"


def relative_path(scope: Scope) -> str:
    """The path below the path that the dashboard is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _cookie_path(scope: Scope) -> str:
    return scope.get("root_path") or "/"


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        found = None
    return "" if found is None else found.value


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
