"""Pages from templates. Everything that comes from a task is text: escaped, and never a link."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from omniq.dashboard.app_state import state_of
from omniq.dashboard.middleware import User
from omniq.operations.formatting import count_of, error_line, format_duration, relative_time
from omniq.to_json import plain

_LONGEST_VALUE = 20_000


def environment() -> Environment:
    """The templates, with the words they use."""
    found = Environment(
        loader=PackageLoader("omniq.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        duration=format_duration,
        number=number,
        rate=rate,
        value=value_text,
        brief=brief,
        error=lambda details: brief(error_line(details)),
        percent=lambda fraction: f"{fraction:.0%}",
    )
    found.globals.update(ago=ago, at=at, count_of=count_of)
    for name in found.list_templates():
        # Compiled now, and not while the first reader waits.
        found.get_template(name)
    return found


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A whole page."""
    state = state_of(request)
    user: User | None = request.scope.get("omniq.user")
    session = None if user is None else user.session
    notice = ""
    if session is not None and status == 200:
        notice, session.notice = session.notice, ""
    html = request.app.state.templates.get_template(template).render(
        base=request.scope.get("root_path", ""),
        here=request.url.path.removeprefix(request.scope.get("root_path", "")) or "/",
        query=request.url.query,
        user=user,
        may_change=user is not None and user.role == "operator",
        token="" if session is None else session.token,
        notice=notice,
        now=state.clock.now(),
        look=state.sampler.latest,
        trouble=state.sampler.error,
        **context,
    )
    return HTMLResponse(html, status)


def ago(instant: datetime | None, now: datetime) -> Markup | str:
    """How far away an instant is, with the exact one on hover."""
    return "" if instant is None else _time(instant, relative_time(instant, now), "ago")


def at(instant: datetime | None) -> Markup | str:
    """An instant, which the page turns into the reader's own zone."""
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
    """A count with its thousands apart, a large one rounded.

    >>> number(1234), number(12_345_678)
    ('1,234', '12.3 M')
    """
    return f"{value / 1_000_000:.1f} M" if value >= 10_000_000 else f"{value:,.0f}"


def rate(value: float) -> str:
    """So many a second.

    >>> rate(0.04), rate(7.25), rate(1234.5)
    ('0.04', '7.2', '1,234')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 or value == 0 else f"{value:.2f}"


def brief(error: str) -> str:
    """The line of an error without the module that its type comes from.

    >>> brief("omniq.models.PermanentError: no such mailbox")
    'PermanentError: no such mailbox'
    """
    kind, separator, rest = error.partition(": ")
    return kind.rpartition(".")[2] + separator + rest if separator else error


def value_text(value: Any) -> str:
    """A value as JSON that a person can read, cut when it is very long."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    if len(text) > _LONGEST_VALUE:
        return f"{text[:_LONGEST_VALUE]}\n… {len(text) - _LONGEST_VALUE:,} characters left out"
    return text
