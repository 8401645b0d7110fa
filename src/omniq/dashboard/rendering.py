"""Renders pages from templates. All values of tasks are escaped text, never links."""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from omniq.dashboard.app_state import state_of
from omniq.dashboard.cookies import delete_notice, read_notice
from omniq.dashboard.middleware import User
from omniq.operations.formatting import (
    count_of,
    format_duration,
    letter_line,
    relative_time,
    timeout_text,
)
from omniq.to_json import plain

_MAX_VALUE_LENGTH = 20_000


@functools.cache
def environment() -> Environment:
    """The templates, with their filters and functions. All applications of a process share them."""
    templates = Environment(
        loader=PackageLoader("omniq.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        duration=format_duration,
        timeout=timeout_text,
        number=number,
        rate=rate,
        value=value_text,
        brief=brief,
        error=lambda letter: brief(letter_line(letter)),
        percent=lambda fraction: f"{fraction:.0%}",
    )
    templates.globals.update(ago=ago, at=at, count_of=count_of)
    for name in templates.list_templates():
        # Compiled now, so that the first request does not wait for it.
        templates.get_template(name)
    return templates


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A page. Shows the message of the last action, and deletes it.

    Without a user it has no navigation, no counts, and nothing about the storage.
    """
    state = state_of(request)
    user: User | None = request.scope.get("omniq.user")
    session = None if user is None else user.session
    notice = "" if session is None or status != 200 else read_notice(request.headers, session)
    html = request.app.state.templates.get_template(template).render(
        base=request.scope.get("root_path", ""),
        current_path=request.url.path.removeprefix(request.scope.get("root_path", "")) or "/",
        query=request.url.query,
        user=user,
        may_change=user is not None and user.role == "operator",
        token="" if session is None else session.token,
        notice=notice,
        now=state.clock.now(),
        snapshot=None if user is None else state.sampler.latest,
        storage_error=None if user is None else state.sampler.error,
        **context,
    )
    response = HTMLResponse(html, status)
    if notice:
        delete_notice(response, request.scope)
    return response


def own_path(text: str) -> str:
    """The text if it is a path of a page of the dashboard, else the path of the overview.

    >>> own_path("/tasks?status=failed"), own_path("//evil.example/"), own_path("https://evil")
    ('/tasks?status=failed', '/', '/')
    """
    is_path = text.startswith("/") and not text.startswith(("//", "/\\", "/login", "/logout"))
    return text if is_path and text.isascii() and text.isprintable() and "\\" not in text else "/"


def ago(instant: datetime | None, now: datetime) -> Markup | str:
    """The time from now to an instant, with the exact instant on hover."""
    return "" if instant is None else _time(instant, relative_time(instant, now), "ago")


def at(instant: datetime | None) -> Markup | str:
    """An instant in UTC; a script shows it in the reader's time zone."""
    if instant is None:
        return ""
    shown = instant.astimezone(UTC)
    return _time(instant, shown.strftime("%Y-%m-%d %H:%M:%S UTC"), "at")


def _time(instant: datetime, text: str, kind: str) -> Markup:
    exact = instant.astimezone(UTC).isoformat()
    return Markup('<time datetime="{0}" title="{0}" data-time="{1}">{2}</time>').format(
        exact, kind, text
    )


def number(value: float) -> str:
    """A count with thousands separators; a large one is rounded.

    >>> number(1234), number(12_345_678)
    ('1,234', '12.3 M')
    """
    return f"{value / 1_000_000:.1f} M" if value >= 10_000_000 else f"{value:,.0f}"


def rate(value: float) -> str:
    """A number per second, with the digits that matter.

    >>> rate(0.04), rate(7.25), rate(1234.5)
    ('0.04', '7.2', '1,234')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 or value == 0 else f"{value:.2f}"


def brief(error: str) -> str:
    """An error line without the module of the error type.

    >>> brief("omniq.models.PermanentError: no such mailbox")
    'PermanentError: no such mailbox'
    """
    kind, separator, rest = error.partition(": ")
    return kind.rpartition(".")[2] + separator + rest if separator else error


def value_text(value: Any) -> str:
    """A value as indented JSON, truncated if it is very long."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    if len(text) > _MAX_VALUE_LENGTH:
        return f"{text[:_MAX_VALUE_LENGTH]}\n… {len(text) - _MAX_VALUE_LENGTH:,} characters omitted"
    return text
