"""The doorway of the dashboard: every request comes through here before anything else sees it.

It refuses names under which the dashboard is not known (DNS rebinding), methods that nothing here
needs, changes that another site asks for, and strangers; and puts the same strict headers on every
answer.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniq.dashboard.authentication import Access, Role, Session, Sessions, TooManyGuesses

COOKIE = "omniq_session"
MAX_BODY = 4 * 1024 * 1024

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: a browser then says that its own forms come from nowhere.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class User(NamedTuple):
    """Who asks. A program that sends its secret with every request has no session."""

    role: Role
    session: Session | None


class AccessMiddleware:
    """The ASGI middleware that does all of this."""

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
        fresh: list[Session] = []
        outgoing = _with_headers(send, scope, fresh)
        refusal = self._refusal(scope) or self._admit(scope, fresh)
        await (refusal or self._app)(scope, receive, outgoing)

    def _refusal(self, scope: Scope) -> Response | None:
        """What is refused whoever asks."""
        headers = Headers(scope=scope)
        if _name_of(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("unknown host name: see `hosts` of Access", 403)
        if scope["method"] not in ("GET", "POST"):
            return PlainTextResponse("method not allowed", 405, {"allow": "GET, POST"})
        if scope["method"] == "POST":
            if not _is_own_site(headers, scope["scheme"]):
                return PlainTextResponse("this change was asked for by another site", 403)
            if not _is_small(headers.get("content-length", "0")):
                return PlainTextResponse("the request is too large", 413)
        return None

    def _admit(self, scope: Scope, fresh: list[Session]) -> Response | None:
        """Find out who asks; strangers see the way in and nothing else."""
        path = relative_path(scope)
        try:
            user = self._visitor(scope, fresh)
        except TooManyGuesses as error:
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

    def _visitor(self, scope: Scope, fresh: list[Session]) -> User | None:
        headers = Headers(scope=scope)
        kind, _, secret = headers.get("authorization", "").partition(" ")
        session = self._sessions.find(_cookie(headers.get("cookie", "")))
        if self._access.authorize is not None:
            role = self._access.authorize(scope)
            if role is None:
                return None
            if session is None:
                session = self._sessions.begin(role)
                fresh.append(session)
            return User(self._allowed(role), session)
        if kind.lower() == "bearer":
            role = self._sessions.role_of(secret.strip(), client_of(scope))
            return None if role is None else User(self._allowed(role), None)
        return None if session is None else User(self._allowed(session.role), session)

    def _allowed(self, role: Role) -> Role:
        return Role.VIEWER if self._access.read_only else role


def user_of(request: Request) -> User:
    """Who asks; the doorway has let them in."""
    user = request.scope["omniq.user"]
    assert isinstance(user, User)
    return user


def set_cookie(response: Response, scope: Scope, session: Session) -> None:
    """Let the browser keep the session, for this site alone and out of reach of scripts."""
    response.set_cookie(
        COOKIE,
        session.id,
        path=_cookie_path(scope),
        secure=scope["scheme"] == "https",
        httponly=True,
        samesite="strict",
    )


def delete_cookie(response: Response, scope: Scope) -> None:
    """Let the browser forget the session."""
    response.delete_cookie(COOKIE, path=_cookie_path(scope), httponly=True, samesite="strict")


def client_of(scope: Scope) -> str:
    """The address that a request came from."""
    client = scope.get("client")
    return client[0] if client else "local"


def relative_path(scope: Scope) -> str:
    """The path within the dashboard, wherever it is mounted."""
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


def _name_of(host: str) -> str:
    """The name in a Host header, without its port; nothing when it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_own_site(headers: Headers, scheme: str) -> bool:
    """Whether a change comes from one of our own pages, as far as the browser says."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None and site != "same-origin":
        return False
    if origin is None:
        return True
    # A proxy that ends TLS speaks plain HTTP to us: the host must be the same, the scheme may not be.
    return origin.lower() in (f"{scheme}://{headers['host']}".lower(), f"https://{headers['host']}")


def _is_small(length: str) -> bool:
    return length.isascii() and length.isdigit() and len(length) < 12 and int(length) <= MAX_BODY


def _with_headers(send: Send, scope: Scope, fresh: list[Session]) -> Send:
    async def outgoing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            for session in fresh:
                response = Response()
                set_cookie(response, scope, session)
                headers.append("set-cookie", response.headers["set-cookie"])
        await send(message)

    return outgoing
