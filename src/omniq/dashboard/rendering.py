"""Renders pages from templates. All values of tasks are escaped text, never links."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from omniq.cron import describe_cron
from omniq.dashboard.app_state import state_of
from omniq.dashboard.cookies import delete_notice, read_notice
from omniq.dashboard.middleware import User
from omniq.dashboard.rights import may
from omniq.log.user_frames import user_frames
from omniq.operations.formatting import (
    count_of,
    format_duration,
    letter_line,
    relative_time,
    timeout_text,
)
from omniq.operations.run_history import RANGES
from omniq.text.to_json import plain

REFRESH_HEADER = "omniq-parts"
"""A request with this header gets only the live parts of a page. Its value is the digests of the parts that the client has."""

PAGES = (
    ("/", "Overview"),
    ("/tasks", "Tasks"),
    ("/dead", "Dead letters"),
    ("/queues", "Queues"),
    ("/flows", "Flows"),
    ("/events", "Events"),
    ("/functions", "Functions"),
    ("/workers", "Workers"),
    ("/schedules", "Schedules"),
    ("/limits", "Limits"),
    ("/audit", "Audit log"),
    ("/storage", "Storage"),
    ("/api", "API"),
)
"""The navigation: path and name of each page."""

SHORTCUTS = tuple(
    (key, path, name) for key, (path, name) in zip("otdqkefwslahp", PAGES, strict=True)
)
"""The key after `g` that leads to each page."""

R = TypeVar("R", bound=Response)

_MAX_VALUE_LENGTH = 20_000
_PAGE_PATIENCE, _REFRESH_PATIENCE = 0.1, 4.0


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
        seconds=lambda value: "–" if value is None else format_duration(value),
        digest=_digest,
        short=short,
        cron=describe_cron,
        user_frames=lambda traceback: "\n".join(user_frames(traceback, str)),
        linked=linked,
        iso=lambda instant: instant.astimezone(UTC).isoformat(),
        minute=lambda instant: instant.astimezone(UTC).strftime("%b %d %H:%M"),
    )
    templates.globals.update(
        ago=ago,
        at=at,
        clock=clock,
        count_of=count_of,
        time_ranges=tuple(RANGES.values()),
        nav=PAGES,
        shortcuts=SHORTCUTS,
    )
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
    # The script of the page requests the parts that have changed: it sends digests of those that it has.
    refresh = request.headers.get(REFRESH_HEADER)
    html = request.app.state.templates.get_template(template).render(
        base=request.scope.get("root_path", ""),
        current_path=request.url.path.removeprefix(request.scope.get("root_path", "")) or "/",
        query=request.url.query,
        user=user,
        may=functools.partial(may, user),
        # A refresh is compressed, so it must not contain a secret: the length of compressed data can disclose it.
        token="" if session is None or refresh is not None else session.token,
        is_refresh=refresh is not None,
        known_parts=frozenset((refresh or "").split()),
        notice=notice,
        now=state.clock.now(),
        snapshot=None if user is None else state.sampler.latest,
        storage_error=None if user is None else state.sampler.error,
        snapshot_is_old=state.sampler.age > state.sampler.stale_after,
        **context,
    )
    response = HTMLResponse(html, status)
    if refresh is not None and accepts_gzip(request):
        response = compressed(response)
    if notice:
        delete_notice(response, request.scope)
    return response


def patience_of(request: Request) -> float:
    """How long the page may wait for a search. A refresh by the script waits: the page it refreshes is not empty."""
    return _REFRESH_PATIENCE if REFRESH_HEADER in request.headers else _PAGE_PATIENCE


def accepts_gzip(request: Request) -> bool:
    """Whether the client accepts compressed responses."""
    return "gzip" in request.headers.get("accept-encoding", "")


def compressed(response: R) -> R:
    """The response with its body compressed. Do not use it for a response that contains a secret."""
    response.body = gzip.compress(response.body, compresslevel=5, mtime=0)
    response.headers["content-length"] = str(len(response.body))
    response.headers["content-encoding"] = "gzip"
    response.headers["vary"] = "accept-encoding"
    return response


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:12]


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


def clock(instant: datetime, day_names: bool) -> Markup:
    """A time of day, or a day, for the axis of a chart; a script shows it in the reader's time zone."""
    text = instant.astimezone(UTC).strftime("%b %d" if day_names else "%H:%M")
    return _time(instant, text, "day" if day_names else "clock")


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


def short(value: float) -> str:
    """A count in a short form.

    >>> short(987), short(12_345)
    ('987', '12 k')
    """
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.0f} k"


_TASK_ID = re.compile(r"\bTask ([0-9A-Za-z_.-]{1,128}) ")


def linked(notice: str, base: str) -> Markup:
    """A message in which the id of a task is a link to its page."""
    parts = _TASK_ID.split(notice, maxsplit=1)
    if len(parts) != 3:
        return Markup("{}").format(notice)
    before, task_id, after = parts
    return Markup('{}Task <a href="{}/tasks/{}">{}</a> {}').format(
        before, base, task_id, task_id, after
    )


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
