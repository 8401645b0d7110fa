"""How a change is let through: by an operator, with their token, and never without an audit line."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

from omniq.dashboard import actions
from omniq.dashboard.app_state import state_of
from omniq.dashboard.authentication import Role, is_token
from omniq.dashboard.middleware import MAX_BODY, client_of, user_of
from omniq.errors import OmniqError
from omniq.events import OperatorActed

TOKEN_HEADER = "x-omniq-token"
_MOST_FIELDS = 2_000


async def change(
    request: Request,
    action: actions.Action,
    told_by: Callable[[], actions.Request],
    token: str,
) -> actions.Done:
    """Do what was asked for, and write down by whom. `token` is what came with it."""
    user = user_of(request)
    audit = _Audit(request, action)
    if user.role is not Role.OPERATOR:
        audit.tell("", "refused (not an operator)")
        raise HTTPException(403, "only an operator may change something")
    # A secret that is sent on purpose is its own proof; a cookie is sent without asking.
    if user.session is not None and not is_token(user.session, token):
        audit.tell("", "refused (no token)")
        raise HTTPException(403, "the page is out of date: open it again and repeat this")
    subject = ""
    try:
        told = told_by()
        subject = told.subject
        done = await actions.perform(state_of(request), action, told)
    except OmniqError as error:
        audit.tell(subject, actions.outcome_of(error))
        raise
    audit.tell(subject, f"{done.done} done, {len(done.refused)} refused")
    return done


async def body_of(request: Request) -> bytes:
    """The body of a request, bounded also where its length was not announced."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise HTTPException(413, "the request is too large")
        parts.append(part)
    return b"".join(parts)


async def form_of(request: Request) -> list[tuple[str, str]]:
    """The fields of a submitted form, in order."""
    text = (await body_of(request)).decode("utf-8", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise HTTPException(413, "too many fields") from None


class _Audit:
    """Tells who has tried what."""

    def __init__(self, request: Request, action: actions.Action) -> None:
        self._request = request
        self._action = action

    def tell(self, subject: str, outcome: str) -> None:
        state_of(self._request).events.emit(
            OperatorActed(
                action=self._action.path,
                subject=subject,
                outcome=outcome,
                by=user_of(self._request).role,
                client=client_of(self._request.scope),
            )
        )
