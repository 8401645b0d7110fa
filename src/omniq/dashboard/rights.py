"""What each role may do, and what a user of the surrounding application may do within the role."""

from __future__ import annotations

from fnmatch import fnmatchcase

from omniq.dashboard.authentication import Role
from omniq.dashboard.middleware import User

SUPPORT = frozenset(
    (
        "tasks/retry",
        "tasks/run-now",
        "tasks/run-again",
        "tasks/cancel",
        "flows/retry",
        "events/send",
        "schedules/trigger",
        "notes/add",
    )
)
"""The actions of support: each is about single tasks, and none deletes anything."""


def may(user: User | None, action: str) -> bool:
    """Whether the user may perform the action with this path.

    >>> may(User(Role.SUPPORT, None), "tasks/retry"), may(User(Role.SUPPORT, None), "queues/pause")
    (True, False)
    >>> may(User(Role.OPERATOR, None, actions=("queues/*",)), "queues/pause")
    True
    """
    if user is None or user.role is Role.VIEWER:
        return False
    if user.role is Role.SUPPORT and action not in SUPPORT:
        return False
    return user.actions is None or any(fnmatchcase(action, each) for each in user.actions)
