"""Who may use the dashboard, and in which role: secrets, one-time links and sessions.

The number of wrong secrets per minute is limited.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omniq.clock import Clock, new_secret
from omniq.errors import OmniqError, SettingsError

OPERATOR_VARIABLE = "OMNIQ_DASHBOARD_OPERATOR"
VIEWER_VARIABLE = "OMNIQ_DASHBOARD_VIEWER"

_MIN_SECRET_LENGTH = 12
_SESSION_SECONDS = 12 * 3_600
_MAX_SESSIONS = 500
_ATTEMPT_WINDOW = 60.0
_MAX_WRONG_PER_CLIENT = 5
_MAX_WRONG = 50


class Role(StrEnum):
    """A viewer reads; an operator may also perform actions."""

    VIEWER = "viewer"
    OPERATOR = "operator"


Authorize = Callable[[Mapping[str, Any]], Role | None]
"""Returns the role of the user, given the ASGI scope of a request; None to refuse the request."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may use the dashboard. Without any credentials, only one-time links grant access.

    `operator` and `viewer` are secrets: people sign in with them, and programs send them as a
    bearer token. `authorize` lets the surrounding application decide. `hosts` are the host names
    that requests may use, besides those of the loopback interface. `read_only` makes every user a
    viewer.
    """

    operator: str | None = field(default=None, repr=False)
    viewer: str | None = field(default=None, repr=False)
    authorize: Authorize | None = None
    hosts: tuple[str, ...] = ()
    read_only: bool = False

    def __post_init__(self) -> None:
        for name, secret in (("operator", self.operator), ("viewer", self.viewer)):
            if secret is not None and len(secret) < _MIN_SECRET_LENGTH:
                raise SettingsError(
                    f"the dashboard's {name} secret is too short: "
                    f"use {_MIN_SECRET_LENGTH} characters or more"
                )

    @classmethod
    def from_environment(cls, *, hosts: tuple[str, ...] = (), read_only: bool = False) -> Access:
        """The secrets in OMNIQ_DASHBOARD_OPERATOR and OMNIQ_DASHBOARD_VIEWER, if they are set."""
        return cls(
            operator=os.environ.get(OPERATOR_VARIABLE) or None,
            viewer=os.environ.get(VIEWER_VARIABLE) or None,
            hosts=hosts,
            read_only=read_only,
        )

    @property
    def has_credentials(self) -> bool:
        """Whether a user can get access without a one-time link."""
        return self.operator is not None or self.viewer is not None or self.authorize is not None


class TooManyAttempts(OmniqError):
    """Too many wrong secrets were sent recently, by this client or by all clients together."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many wrong attempts; try again in {seconds:.0f} seconds")
        self.seconds = seconds


@dataclass
class Session:
    """A signed-in browser. Every change it requests must carry `token`."""

    id: str = field(repr=False)
    role: Role
    token: str = field(repr=False)
    ends: float
    notice: str = ""
    """A message that the next page shows once."""


class Sessions:
    """All sessions, in the memory of this process: a restart signs every user out."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._sessions: MutableMapping[bytes, Session] = {}
        self._link: bytes | None = None
        self._wrong: deque[tuple[float, str]] = deque()
        self.on_link_used: Callable[[], None] = _ignore
        """Called when the one-time link was used, so that the next one can be printed."""

    def new_link(self) -> str:
        """A token that signs one browser in as an operator, once. Voids the previous token."""
        token = new_secret()
        self._link = _digest(token)
        return token

    def redeem(self, token: str, client: str) -> Session | None:
        """The new session for a one-time token; None if the token is wrong or was used."""
        self._check_attempts(client)
        if self._link is None or not hmac.compare_digest(self._link, _digest(token)):
            self._wrong.append((self._clock.monotonic(), client))
            return None
        self._link = None
        session = self.begin(Role.OPERATOR)
        self.on_link_used()
        return session

    def sign_in(self, secret: str, client: str) -> Session | None:
        """The new session for a secret; None if the secret is wrong."""
        role = self.role_of(secret, client)
        return None if role is None else self.begin(role)

    def role_of(self, secret: str, client: str) -> Role | None:
        """The role that the secret grants. Raises `TooManyAttempts` when the client must wait."""
        self._check_attempts(client)
        # Both are always compared, and in full: the duration reveals nothing about either.
        is_operator = _is_same(self._access.operator, secret)
        is_viewer = _is_same(self._access.viewer, secret)
        if is_operator:
            return Role.OPERATOR
        if is_viewer:
            return Role.VIEWER
        self._wrong.append((self._clock.monotonic(), client))
        return None

    def begin(self, role: Role) -> Session:
        """A new session. Ends the oldest one when there are too many."""
        now = self._clock.monotonic()
        while len(self._sessions) >= _MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = Session(new_secret(), role, new_secret(), now + _SESSION_SECONDS)
        self._sessions[_digest(session.id)] = session
        return session

    def find(self, session_id: str) -> Session | None:
        """The session with that id; None if there is none or it has expired."""
        session = self._sessions.get(_digest(session_id))
        if session is None or session.ends > self._clock.monotonic():
            return session
        self.end(session)
        return None

    def end(self, session: Session) -> None:
        """Sign out."""
        self._sessions.pop(_digest(session.id), None)

    def _check_attempts(self, client: str) -> None:
        """Limit wrong secrets per minute: a few from one address, some more from all addresses."""
        now = self._clock.monotonic()
        while self._wrong and now - self._wrong[0][0] > _ATTEMPT_WINDOW:
            self._wrong.popleft()
        by_client = sum(address == client for _, address in self._wrong)
        if by_client >= _MAX_WRONG_PER_CLIENT or len(self._wrong) >= _MAX_WRONG:
            raise TooManyAttempts(_ATTEMPT_WINDOW - (now - self._wrong[0][0]))


def is_token_of(session: Session, given: str) -> bool:
    """Whether this is the token that every change of the session must carry."""
    return _is_same(session.token, given)


def _is_same(secret: str | None, given: str) -> bool:
    return hmac.compare_digest(_digest(secret or ""), _digest(given)) and secret is not None


def _digest(text: str) -> bytes:
    # Digests are compared instead of texts: all have one length, and a leaked digest is useless.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _ignore() -> None:
    """Do nothing."""
