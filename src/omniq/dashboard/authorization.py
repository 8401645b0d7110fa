"""Performs an action for a request: checks the role and the token, and emits an audit event."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

from omniq.dashboard import actions
from omniq.dashboard.action_requests import ActionRequest, ActionResult
from omniq.dashboard.app_state import state_of
from omniq.dashboard.authentication import is_token_of
from omniq.dashboard.middleware import MAX_BODY, client_of, user_of
from omniq.dashboard.rights import may
from omniq.errors import OmniqError
from omniq.events import OperatorActed
from omniq.models import AuditEntry

TOKEN_HEADER = "x-omniq-token"
_MAX_FIELDS = 2_000
_MAX_SUBJECT = 500


async def perform_authorized(
    request: Request,
    action: actions.Action,
    parse: Callable[[], ActionRequest],
    token: str,
) -> ActionResult:
    """Perform the action if the user may. Every attempt is audited, refused ones too.

    `parse` reads the parameters from the request; `token` is the session token it carried.
    """
    user = user_of(request)
    audit = _Audit(request, action)
    if not may(user, action.path):
        await audit.record("", f"refused (not allowed to a {user.role})")
        raise HTTPException(403, f"{user.shown} may not do this: {action.summary}")
    # A program sends its secret deliberately; a browser sends its cookie with any request.
    if user.session is not None and not is_token_of(user.session, token):
        await audit.record("", "refused (no token)")
        raise HTTPException(403, "the page is out of date: reload it and repeat the action")
    subject = ""
    try:
        parameters = parse()
        subject = parameters.subject
        result = await actions.perform(state_of(request), action, parameters)
    except OmniqError as error:
        await audit.record(subject, actions.outcome_of(error))
        raise
    outcome = f"{result.done} done, {len(result.refused)} refused"
    await audit.record(subject, outcome, parameters.remark, is_effect=action.is_entry)
    return result


async def read_body(request: Request) -> bytes:
    """The body of a request. The limit also applies when no length was announced."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise HTTPException(413, "the request is too large")
        parts.append(part)
    return b"".join(parts)


async def read_form(request: Request) -> list[tuple[str, str]]:
    """The fields of a submitted form, in order."""
    text = (await read_body(request)).decode("utf-8", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise HTTPException(413, "too many fields") from None


class _Audit:
    """Emits an `OperatorActed` event for each attempt of an action, and stores it."""

    def __init__(self, request: Request, action: actions.Action) -> None:
        self._request = request
        self._action = action

    async def record(
        self, subject: str, outcome: str, note: str = "", *, is_effect: bool = False
    ) -> None:
        """Record the outcome. With `is_effect` the entry itself is what the user asked for, so it must be stored."""
        state = state_of(self._request)
        event = OperatorActed(
            action=self._action.path,
            subject=subject,
            outcome=outcome,
            by=user_of(self._request).shown,
            client=client_of(self._request.scope),
        )
        state.events.emit(event)
        entry = AuditEntry(
            at=state.clock.now(),
            action=event.action,
            subject=subject[:_MAX_SUBJECT],
            outcome=outcome,
            by=event.by,
            client=event.client,
            note=note,
        )
        if is_effect:
            await state.storage.add_audit_entry(entry)
            state.invalidate()
            return
        # The event has the same data: an unreachable storage must not change the response.
        with suppress(OmniqError):
            await state.storage.add_audit_entry(entry)
