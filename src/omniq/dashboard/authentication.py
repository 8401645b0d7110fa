"""Who may come in, and as what: secrets, one-time links, sessions, and how often one may guess."""

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

_SHORTEST = 12
_SESSION_SECONDS = 12 * 3_600
_MOST_SESSIONS = 500
_GUESS_WINDOW = 60.0
_GUESSES = 5
_GUESSES_OF_ALL = 50


class Role(StrEnum):
    """A viewer looks; an operator may also change things."""

    VIEWER = "viewer"
    OPERATOR = "operator"


Authorize = Callable[[Mapping[str, Any]], Role | None]
"""Given the ASGI scope of a request, who that is; None for a stranger."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may use the dashboard. Without any of it, only one-time links let somebody in.

    `operator` and `viewer` are secrets that one signs in with, or sends as a bearer token.
    `authorize` leaves it to the application around it. `hosts` are the names under which it may be
    reached, besides those of the loopback interface. `read_only` makes everybody a viewer.
    """

    operator: str | None = field(default=None, repr=False)
    viewer: str | None = field(default=None, repr=False)
    authorize: Authorize | None = None
    hosts: tuple[str, ...] = ()
    read_only: bool = False

    def __post_init__(self) -> None:
        for name, secret in (("operator", self.operator), ("viewer", self.viewer)):
            if secret is not None and len(secret) < _SHORTEST:
                raise SettingsError(
                    f"the dashboard's {name} secret is too short: use {_SHORTEST} characters or more"
                )

    @classmethod
    def from_environment(cls, *, hosts: tuple[str, ...] = (), read_only: bool = False) -> Access:
        """The secrets in OMNIQ_DASHBOARD_OPERATOR and OMNIQ_DASHBOARD_VIEWER, if there are any."""
        return cls(
            operator=os.environ.get(OPERATOR_VARIABLE) or None,
            viewer=os.environ.get(VIEWER_VARIABLE) or None,
            hosts=hosts,
            read_only=read_only,
        )

    @property
    def has_credentials(self) -> bool:
        """Whether somebody can get in without a one-time link."""
        return self.operator is not None or self.viewer is not None or self.authorize is not None


class TooManyGuesses(OmniqError):
    """Somebody has tried too many wrong secrets lately."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many wrong attempts; try again in {seconds:.0f} seconds")
        self.seconds = seconds


@dataclass
class Session:
    """Somebody who has come in. `token` goes with every change they ask for."""

    id: str = field(repr=False)
    role: Role
    token: str = field(repr=False)
    ends: float
    notice: str = ""
    """What to tell them on the next page, once."""


class Sessions:
    """Everybody who is in, in the memory of this process: a restart signs everybody out."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._sessions: MutableMapping[bytes, Session] = {}
        self._link: bytes | None = None
        self._guesses: deque[tuple[float, str]] = deque()
        self.on_link_used: Callable[[], None] = _nothing
        """Called when a one-time link has been used: time to print the next."""

    def new_link(self) -> str:
        """A token that lets its bearer in once, as an operator. The one before it is void."""
        token = new_secret()
        self._link = _digest(token)
        return token

    def redeem(self, token: str, client: str) -> Session | None:
        """The session that a one-time token opens; None for a wrong or used one."""
        self._check_guesses(client)
        if self._link is None or not hmac.compare_digest(self._link, _digest(token)):
            self._guesses.append((self._clock.monotonic(), client))
            return None
        self._link = None
        session = self.begin(Role.OPERATOR)
        self.on_link_used()
        return session

    def sign_in(self, secret: str, client: str) -> Session | None:
        """The session that a secret opens; None for a wrong one."""
        role = self.role_of(secret, client)
        return None if role is None else self.begin(role)

    def role_of(self, secret: str, client: str) -> Role | None:
        """Whose secret that is. Raises `TooManyGuesses` when the client should wait."""
        self._check_guesses(client)
        # Both are compared, always in full: how long it takes tells nothing about either.
        is_operator = _is_same(self._access.operator, secret)
        is_viewer = _is_same(self._access.viewer, secret)
        if is_operator:
            return Role.OPERATOR
        if is_viewer:
            return Role.VIEWER
        self._guesses.append((self._clock.monotonic(), client))
        return None

    def begin(self, role: Role) -> Session:
        """A fresh session; the oldest gives way when there are too many."""
        now = self._clock.monotonic()
        while len(self._sessions) >= _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = Session(new_secret(), role, new_secret(), now + _SESSION_SECONDS)
        self._sessions[_digest(session.id)] = session
        return session

    def find(self, session_id: str) -> Session | None:
        """The session of that id, unless it has ended."""
        session = self._sessions.get(_digest(session_id))
        if session is None or session.ends > self._clock.monotonic():
            return session
        self.end(session)
        return None

    def end(self, session: Session) -> None:
        """Sign out."""
        self._sessions.pop(_digest(session.id), None)

    def _check_guesses(self, client: str) -> None:
        """From one address a few wrong guesses a minute, from all together somewhat more."""
        now = self._clock.monotonic()
        while self._guesses and now - self._guesses[0][0] > _GUESS_WINDOW:
            self._guesses.popleft()
        by_client = sum(who == client for _, who in self._guesses)
        if by_client >= _GUESSES or len(self._guesses) >= _GUESSES_OF_ALL:
            raise TooManyGuesses(_GUESS_WINDOW - (now - self._guesses[0][0]))


def is_token(session: Session, given: str) -> bool:
    """Whether that is what every change must carry that the session asks for."""
    return _is_same(session.token, given)


def _is_same(secret: str | None, given: str) -> bool:
    return hmac.compare_digest(_digest(secret or ""), _digest(given)) and secret is not None


def _digest(text: str) -> bytes:
    # Compared in place of the text: of one length, and what leaks of it is worth nothing.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _nothing() -> None:
    """Nobody wants to know."""
