"""Checks that no other user of the machine can write to a file or folder, or replace it.

A file can be replaced by those who may write to its folder, and a folder by those who may write to
the folder above it. Therefore the whole path is checked, from `/` on, with the owners of the links
in it. Nothing on a path that was accepted can be changed by another user afterwards, so it does not
matter how much later it is opened.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40


@dataclass(frozen=True, kw_only=True)
class PlaceRules:
    """Refuses what another user could change. Root is never another user.

    `refusal` makes the error from its text. `danger` says what the other user could do. `mend` and
    `mend_owner` end the text: how to use the place nevertheless. `any_owner`: accept every owner.
    """

    refusal: Callable[[str], Exception]
    danger: str
    mend: str = ""
    mend_owner: str = ""
    any_owner: bool = False

    def check_folder(self, path: Path) -> None:
        """Refuse a folder that another user may write to, or whose path another user may change.

        Folders above it may be open to all if only the owner of an entry may replace it, as in
        `/tmp`. A folder that does not exist is accepted if the folders above it are.
        """
        walk = _Walk(path.absolute())
        try:
            self._check_above(walk.facts, walk.place)
            while walk.has_more:
                if (link := walk.step()) is not None:
                    self._check_owner(link, walk.place)
                elif walk.has_more:
                    self._check_above(walk.facts, walk.place)
            self.check(walk.facts, walk.place)
        except FileNotFoundError:
            return
        except OSError as error:
            reason = f"cannot be created or used ({error.strerror}); check the path"
            raise self.refusal(f"{path}: {reason}") from error
        finally:
            walk.close()

    def check(self, facts: os.stat_result, place: Path) -> None:
        """Refuse a file or folder of another user, or that another user may write to."""
        self._check_owner(facts, place)
        self._check_mode(facts, place)

    def _check_above(self, facts: os.stat_result, place: Path) -> None:
        self._check_owner(facts, place)
        # Here only the owner of an entry may replace it, and the owner of each entry is checked.
        if not facts.st_mode & stat.S_ISVTX:
            self._check_mode(facts, place)

    def _check_owner(self, facts: os.stat_result, place: Path) -> None:
        user = os.geteuid()
        if self.any_owner or facts.st_uid in (0, user):
            return
        raise self.refusal(
            f"{place}: belongs to another user (uid {facts.st_uid}), who could {self.danger}; if it "
            f"should be yours, run chown {user} {shlex.quote(str(place))}"
            f"{self.mend_owner}{self.mend}"
        )

    def _check_mode(self, facts: os.stat_result, place: Path) -> None:
        for_others = bool(facts.st_mode & stat.S_IWOTH)
        for_group = bool(facts.st_mode & stat.S_IWGRP) and not is_own_group(
            facts.st_gid, facts.st_uid
        )
        if not for_others and not for_group:
            return
        by = "every user of this machine" if for_others else f"group {_group_name(facts.st_gid)}"
        letters = "g" * for_group + "o" * for_others
        raise self.refusal(
            f"{place}: {by} may write to it, and so {self.danger}; "
            f"run chmod {letters}-w {shlex.quote(str(place))}{self.mend}"
        )


class _Walk:
    """Goes down a path from `/`, one name at a time, and follows links itself.

    Each folder is opened relative to the one before it. So the folders that are checked are those
    that are used, also if a name on the path is replaced meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._names = list(reversed(path.parts[1:]))
        self._links = 0
        self._folder = os.open("/", _FOLDER)
        self._above = Path("/")
        self.place = Path("/")
        """The folder or link that was reached."""

    @property
    def has_more(self) -> bool:
        return bool(self._names)

    @property
    def facts(self) -> os.stat_result:
        """The owner and the mode of the folder that was reached."""
        return os.fstat(self._folder)

    def step(self) -> os.stat_result | None:
        """Go to the next name. If it is a link, return its owner and mode, and continue at its target."""
        name = self._names.pop()
        self.place = self._above.parent if name == ".." else self._above / name
        facts = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        if not stat.S_ISLNK(facts.st_mode):
            self._enter(os.open(name, _FOLDER, dir_fd=self._folder))
            self._above = self.place
            return None
        self._links += 1
        if self._links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = Path(os.readlink(name, dir_fd=self._folder))
        if target.is_absolute():
            self._enter(os.open("/", _FOLDER))
            self._above = Path("/")
        self._names += reversed([part for part in target.parts if part != "/"])
        return facts

    def close(self) -> None:
        os.close(self._folder)

    def _enter(self, folder: int) -> None:
        os.close(self._folder)
        self._folder = folder


def is_own_group(gid: int, owner: int) -> bool:
    """Whether no user is in the group but root, this user and the owner of the file.

    That is the group that many systems create for each user, under the user's name. Members are
    also those who have it as their first group.
    """
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        # Without an entry, as in a container that runs under a plain number, it has no members.
        return gid == os.getegid()
    users = {user.pw_name: user for user in pwd.getpwall()}
    members = {*group.gr_mem, *(name for name, user in users.items() if user.pw_gid == gid)}
    allowed = {name for name, user in users.items() if user.pw_uid in (0, owner, os.geteuid())}
    # A directory service may not list all of its users: only the name tells whose group it is.
    return members <= allowed and group.gr_name in allowed


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
