"""The cookies of the dashboard: the session, and the message that the next page shows."""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from http.cookies import CookieError, SimpleCookie
from typing import Literal, TypedDict

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from omniq.dashboard.authentication import Session

COOKIE = "omniq_session"

_NOTICE = "omniq_notice"
_NOTICE_SECONDS = 60
_MAX_NOTICE = 500


class _Options(TypedDict):
    path: str
    secure: bool
    httponly: bool
    samesite: Literal["lax"]


def session_cookie(headers: Headers) -> str:
    """The value of the session cookie; empty without one."""
    found = _read(headers)
    # The one that is hardest to plant comes first.
    names = (f"__Host-{COOKIE}", f"__Secure-{COOKIE}", COOKIE)
    return next((found[name] for name in names if name in found), "")


def set_cookie(response: Response, scope: Scope, session: Session) -> None:
    """Set the session cookie: not readable by scripts, not sent with forms of other sites.

    It is sent when a user follows a link from another site, so that a link to a task works.
    """
    response.set_cookie(_name(scope), session.cookie, **_options(scope))


def delete_cookie(response: Response, scope: Scope) -> None:
    """Delete the session cookie, whatever its name is."""
    for name in (COOKIE, f"__Secure-{COOKIE}", f"__Host-{COOKIE}"):
        options = _options(scope)
        if name != COOKIE:
            # Browsers ignore a change of such a cookie without this.
            options["secure"] = True
        response.delete_cookie(name, **options)


def set_notice(response: Response, scope: Scope, session: Session, text: str) -> None:
    """Let the next page of this browser show a message."""
    packed = urlsafe_b64encode(text[:_MAX_NOTICE].encode("utf-8", "replace")).decode()
    value = f"{packed}.{_signature(session, packed)}"
    response.set_cookie(_NOTICE, value, max_age=_NOTICE_SECONDS, **_options(scope))


def read_notice(headers: Headers, session: Session) -> str:
    """The message to show; empty if there is none, or if another site has planted it."""
    packed, _, signature = _read(headers).get(_NOTICE, "").partition(".")
    expected = _signature(session, packed)
    if not packed or not hmac.compare_digest(expected.encode(), signature.encode()):
        return ""
    return urlsafe_b64decode(packed).decode("utf-8", "replace")


def delete_notice(response: Response, scope: Scope) -> None:
    """Delete the message: it was shown."""
    response.delete_cookie(_NOTICE, **_options(scope))


def _signature(session: Session, packed: str) -> str:
    return hmac.new(session.token.encode(), packed.encode(), hashlib.sha256).hexdigest()


def _name(scope: Scope) -> str:
    """With a prefix by which browsers refuse such a cookie from another host, or without TLS."""
    if not scope["omniq.https"]:
        return COOKIE
    return f"__Secure-{COOKIE}" if scope.get("root_path") else f"__Host-{COOKIE}"


def _options(scope: Scope) -> _Options:
    return {
        "path": scope.get("root_path") or "/",
        "secure": scope["omniq.https"],
        "httponly": True,
        "samesite": "lax",
    }


def _read(headers: Headers) -> dict[str, str]:
    try:
        found = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in found.items()}
