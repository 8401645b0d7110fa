"""Who may use the dashboard, and in which role: secrets, one-time links and sessions."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omniq.clock import Clock, new_secret
from omniq.errors import SettingsError

OPERATOR_VARIABLE = "OMNIQ_DASHBOARD_OPERATOR"
SUPPORT_VARIABLE = "OMNIQ_DASHBOARD_SUPPORT"
VIEWER_VARIABLE = "OMNIQ_DASHBOARD_VIEWER"
LINK_SECONDS = 600.0
"""How long a one-time link is valid."""

_MIN_SECRET_LENGTH = 12
_SESSION_SECONDS = 12 * 3_600
_MAX_COOKIE_LENGTH = 500
MAX_NAME = 60
_MAX_ENDED = 10_000
_KEY_ROUNDS = 100_000


class Role(StrEnum):
    """A viewer reads; support also repeats and cancels single tasks; an operator may perform every action."""

    VIEWER = "viewer"
    SUPPORT = "support"
    OPERATOR = "operator"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A user of the surrounding application: the role, the name for the audit log, and what the user may do.

    `actions` are paths of actions, such as `tasks/retry`, or patterns, such as `queues/*`; None: all that
    the role has. They never allow more than the role does.
    """

    role: Role
    name: str = ""
    actions: tuple[str, ...] | None = None


Answer = Role | Identity | None

Authorize = Callable[[Mapping[str, Any]], Answer | Awaitable[Answer]]
"""Returns the role or the identity of the user, given the ASGI scope of a request; None to refuse the request.

It may be an `async def`. Any other value refuses the request.
"""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may use the dashboard. Without any credentials, only one-time links grant access.

    `operator`, `support` and `viewer` are secrets: people sign in with them, and programs send them as a
    bearer token. `authorize` lets the surrounding application decide. `hosts` are the host names
    that requests may use, besides those of the loopback interface. `read_only` makes every user a
    viewer.

    `trusted_proxies` are addresses or networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are
    believed. `https` says that browsers use TLS, although the requests that arrive do not.
    """

    operator: str | None = field(default=None, repr=False)
    viewer: str | None = field(default=None, repr=False)
    support: str | None = field(default=None, repr=False)
    authorize: Authorize | None = None
    hosts: tuple[str, ...] = ()
    read_only: bool = False
    trusted_proxies: tuple[str, ...] = ()
    https: bool = False

    def __post_init__(self) -> None:
        for name in Role:
            secret = self.secret_of(name)
            if secret is not None and len(secret) < _MIN_SECRET_LENGTH:
                raise SettingsError(
                    f"the dashboard's {name} secret is too short: "
                    f"use {_MIN_SECRET_LENGTH} characters or more"
                )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError:
                raise SettingsError(
                    f"trusted proxy {proxy!r}: expected an address or a network, such as 10.0.0.0/8"
                ) from None

    @classmethod
    def from_environment(
        cls,
        *,
        hosts: tuple[str, ...] = (),
        read_only: bool = False,
        trusted_proxies: tuple[str, ...] = (),
        https: bool = False,
    ) -> Access:
        """The secrets in OMNIQ_DASHBOARD_OPERATOR, OMNIQ_DASHBOARD_SUPPORT and OMNIQ_DASHBOARD_VIEWER, if they are set."""
        return cls(
            operator=os.environ.get(OPERATOR_VARIABLE) or None,
            viewer=os.environ.get(VIEWER_VARIABLE) or None,
            support=os.environ.get(SUPPORT_VARIABLE) or None,
            hosts=hosts,
            read_only=read_only,
            trusted_proxies=trusted_proxies,
            https=https,
        )

    @property
    def has_credentials(self) -> bool:
        """Whether a user can get access without a one-time link."""
        return self.has_secrets or self.authorize is not None

    @property
    def has_secrets(self) -> bool:
        """Whether people can sign in with a secret."""
        return any(self.secret_of(role) is not None for role in Role)

    def secret_of(self, role: Role) -> str | None:
        """The secret that grants the role; None without one."""
        secrets = {
            Role.VIEWER: self.viewer,
            Role.SUPPORT: self.support,
            Role.OPERATOR: self.operator,
        }
        return secrets[role]


@dataclass(frozen=True)
class Session:
    """A signed-in browser. `cookie` is what it stores; every change must carry `token`.

    `name` is what the user entered at the sign-in, and as trustworthy as those who have the secret.
    """

    cookie: str = field(repr=False)
    role: Role
    token: str = field(repr=False)
    name: str = ""


class Sessions:
    """Makes sessions and reads them again from their cookies. No session is stored.

    A cookie has the role and the end of the session, and a signature under a key that is derived
    from the role's secret. So all processes with the same secrets know all sessions, also after a
    restart, and a new secret ends the sessions of the old one. Without a secret the key is random.
    """

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._random_key = new_secret()
        self._keys: dict[Role, bytes] = {}
        self._link: tuple[bytes, float] | None = None
        self._ended: dict[str, None] = {}

    def new_link(self) -> str:
        """A token that signs one browser in as an operator, once. Voids the previous token."""
        token = new_secret()
        self._link = _digest(token), self._clock.monotonic() + LINK_SECONDS
        return token

    def redeem(self, token: str) -> Session | None:
        """The new session for a one-time token; None if it is wrong, was used, or has expired."""
        if self._link is None:
            return None
        digest, ends = self._link
        if not hmac.compare_digest(digest, _digest(token)) or self._clock.monotonic() >= ends:
            return None
        self._link = None
        return self.begin(Role.OPERATOR)

    def role_of(self, secret: str) -> Role | None:
        """The role that the secret grants; None if it is wrong."""
        # All are always compared, and in full: the duration reveals nothing about any.
        same = {role: _is_same(self._access.secret_of(role), secret) for role in Role}
        return next((role for role in reversed(Role) if same[role]), None)

    def begin(self, role: Role, name: str = "") -> Session:
        """A new session, of a user with this name."""
        ends = int(self._clock.now().timestamp()) + _SESSION_SECONDS
        packed = urlsafe_b64encode(plain_name(name).encode()).decode().rstrip("=")
        return self._signed(role, f"{role}.{ends}.{new_secret()}.{packed}")

    def find(self, cookie: str) -> Session | None:
        """The session of a cookie; None if it is not signed, has expired, or was ended here."""
        text, _, signature = cookie.rpartition(".")
        name, _, rest = text.partition(".")
        if len(cookie) > _MAX_COOKIE_LENGTH or name not in list(Role) or cookie in self._ended:
            return None
        session = self._signed(Role(name), text)
        if not hmac.compare_digest(_digest(session.cookie), _digest(f"{text}.{signature}")):
            return None
        # Only now is the text known to be one that `begin` has written.
        ends = int(rest.partition(".")[0])
        return session if self._clock.now().timestamp() < ends else None

    def end(self, session: Session) -> None:
        """Sign out: this process no longer accepts the cookie, which the browser deletes."""
        self._ended[session.cookie] = None
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _signed(self, role: Role, text: str) -> Session:
        key = self._key(role)
        cookie = f"{text}.{_keyed(key, b'cookie', text)}"
        return Session(cookie, role, _keyed(key, b"token", text), _name_in(text))

    def _key(self, role: Role) -> bytes:
        """The key of a role. That of one role says nothing about the secret of the other."""
        if role not in self._keys:
            secret = self._access.secret_of(role)
            # With many rounds, since a cookie that leaks could be used to try secrets.
            self._keys[role] = hashlib.pbkdf2_hmac(
                "sha256",
                (secret or self._random_key).encode("utf-8", "surrogatepass"),
                f"omniq dashboard {role}".encode(),
                _KEY_ROUNDS,
            )
        return self._keys[role]


def form_session(cookie: str, role: Role) -> Session:
    """The session of a user whom the application authorizes with each request.

    Its cookie grants nothing: it only shows that a form comes from a page of the dashboard. Hence
    it needs no key, and every process accepts it.
    """
    known = cookie if cookie.startswith("form.") and len(cookie) <= _MAX_COOKIE_LENGTH else ""
    cookie = known or f"form.{new_secret()}"
    return Session(cookie, role, _digest(f"omniq form token {cookie}").hex())


def plain_name(name: str) -> str:
    """The name as one short line without control characters.

    >>> plain_name("  Ada\\nLovelace ")
    'Ada Lovelace'
    """
    words = "".join(each if each.isprintable() else " " for each in name).split()
    return " ".join(words)[:MAX_NAME]


def _name_in(text: str) -> str:
    """The name in the text of a cookie; empty without one, or if it cannot be read: it is not yet checked."""
    packed = text.split(".")[3:4]
    try:
        return plain_name(urlsafe_b64decode("".join(packed) + "===").decode())
    except ValueError:
        return ""


def is_token_of(session: Session, given: str) -> bool:
    """Whether this is the token that every change of the session must carry."""
    return _is_same(session.token, given)


def _keyed(key: bytes, purpose: bytes, text: str) -> str:
    return hmac.new(
        key, purpose + b" " + text.encode("utf-8", "surrogatepass"), hashlib.sha256
    ).hexdigest()


def _is_same(secret: str | None, given: str) -> bool:
    return hmac.compare_digest(_digest(secret or ""), _digest(given)) and secret is not None


def _digest(text: str) -> bytes:
    # Digests are compared instead of texts: all have one length, and a leaked digest is useless.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
