"""Leases: one file for each owner, whose name contains the time at which its lease expires.

`leases/<owner>.<boot>.<until>.<length>.<epoch>.<beat>.lease`. An owner renews its lease by renaming the file to a later
time. Another storage fences the owner by renaming the file that it has read to `<owner>.<beat>.<time>.fenced`. If the
owner has renewed meanwhile, that name is gone and the owner is not fenced. If it was fenced, there is no
file to rename, and the renewal fails. An owner that has lost its file never gets a lease again. What is left of it
shows for a day that the store knew it.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import NamedTuple

from omniq.clock import Clock
from omniq.models import WorkerInfo
from omniq.storage.file.encoding import WORKER, NotARecord
from omniq.storage.file.file_names import DocumentName, RowName
from omniq.storage.file.filesystem import Disk
from omniq.storage.row_rules import Row
from omniq.storage.types import Holder

_NAME = re.compile(
    r"([A-Za-z0-9_-]{1,64})\.([0-9a-f]{12})\.(\d{1,16})\.(\d{1,16})\.(\d{1,16})\.(\d{1,16})\.lease"
)
_OTHER_FILES = (".info", ".resting")
"""The endings of an owner's other files: its `WorkerInfo`, and the mark that it is paused."""

_OTHER = re.compile(r"([A-Za-z0-9_-]{1,64})\.(?:info|resting)")
_WRITING = 60 * 10**9
"""Nanoseconds for which a program that restores the folder may be writing a file."""

_FENCED = re.compile(r"([A-Za-z0-9_-]{1,64})\.(\d{1,16})\.(\d{1,16})\.fenced")
_FENCE_RETENTION = 86_400_000_000
"""Microseconds for which a fence is stored at least: longer than any request can be delayed."""

_LISTINGS = 4
_TRIES = 20


class Lease(NamedTuple):
    """An owner's lease; `until` is a time of the boot clock, valid in the boot `boot`.

    `length` is that of its last renewal, `epoch` the store's at that time, `beat` the number of renewals.
    """

    owner: str
    boot: str
    until: int
    length: int = 0
    epoch: int = 0
    beat: int = 0

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        numbers = f"{self.until}.{self.length}.{self.epoch}.{self.beat}"
        return f"leases/{self.owner}.{self.boot}.{numbers}.lease"


class OwnClaims:
    """The claims of this process's owner by the names it knows, shared with the storage's siblings.

    No lock is needed: each operation on the dictionary is atomic.
    """

    def __init__(self) -> None:
        self.owner = ""
        self.folder: tuple[int, int] | None = None
        """The device and the inode of the folder that is open. A sibling opens no other one."""
        self.lease_path = ""
        self.store: tuple[DocumentName | None, bytes | None] = (None, None)
        """The name of the store's record, and the record."""
        self.claims: dict[str, tuple[RowName, Row | None]] = {}
        """The names by id, with the records if they are known: outcomes need them again."""

    def start(self, owner: str, lease_path: str) -> None:
        """Become the owner with that lease."""
        if owner != self.owner:
            self.owner, self.claims = owner, {}
        self.lease_path = lease_path

    def put(self, name: RowName, record: Row | None = None) -> None:
        """Note the new name of a task."""
        if name.owner and name.owner == self.owner:
            self.claims[name.key] = name, record
        else:
            self.claims.pop(name.key, None)

    def record(self, name: RowName) -> Row | None:
        """The record of a claim, which is that of all names with the same content."""
        known, record = self.claims.get(name.key, (None, None))
        return record if known is not None and known.content == name.content else None


class Leases:
    """All leases of the store."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock

    def all(self) -> dict[str, Lease]:
        """All leases, expired or not, by owner."""
        found: dict[str, Lease] = {}
        for name in self._disk.names("leases"):
            match = _NAME.fullmatch(name)
            if match is not None:
                lease = Lease(match[1], match[2], *map(int, match.groups()[2:]))
                if lease.owner not in found or found[lease.owner].until < lease.until:
                    found[lease.owner] = lease
        return found

    def of(self, owner: str) -> Lease | None:
        """The owner's lease, expired or not; None when it has none."""
        for _ in range(_LISTINGS):
            # A listing can miss a lease that is renamed meanwhile, so one listing is no proof.
            lease = self.all().get(owner)
            if lease is not None:
                return lease
        return None

    def is_live(self, lease: Lease, epoch: int) -> bool:
        """Whether the lease is valid now, in the store's epoch."""
        return (
            lease.boot == self._boot()
            and lease.until > self._clock.boot_micros()
            and lease.epoch == epoch
        )

    def renew(self, info: WorkerInfo, duration: int, holder: Holder, epoch: int) -> Lease | None:
        """Extend the lease to `duration` from now; None when the owner may have none in that epoch."""
        lease = self._renew(info.id, duration, holder, epoch)
        if lease is not None:
            self._disk.replace(f"leases/{info.id}.info", WORKER.encode(info), durable=False)
        return lease

    def _renew(self, owner: str, duration: int, holder: Holder, epoch: int) -> Lease | None:
        for _ in range(_TRIES):
            before = self.of(owner)
            until = self._clock.boot_micros() + duration
            if before is None:
                if holder.beat or self.fenced_beat(owner):
                    return None
                after = Lease(owner, self._boot(), until, duration, epoch, 1)
                self._disk.write(after.path, b"", durable=False)
                return after
            if holder.beat and (before.epoch != epoch or before.beat < holder.beat):
                return None
            after = Lease(owner, self._boot(), until, duration, epoch, before.beat + 1)
            if self._disk.move(before.path, after.path):
                return after
        return None

    def beat(self, owner: str) -> int:
        """The beat of the owner's lease, or of the lease that it had; 0 when nothing is known of it."""
        lease = self.of(owner)
        return self.fenced_beat(owner) if lease is None else lease.beat

    def fenced_beat(self, owner: str) -> int:
        """The beat of a lease that was ended within the last day, or 0."""
        found = map(_FENCED.fullmatch, self._disk.names("leases"))
        return max((int(each[2]) for each in found if each and each[1] == owner), default=0)

    def fence(self, lease: Lease) -> bool:
        """Fence the owner, unless it has renewed meanwhile; returns whether it has no lease now."""
        with suppress(IsADirectoryError, PermissionError):
            fenced = f"leases/{lease.owner}.{lease.beat}.{self._clock.micros()}.fenced"
            ended = self._disk.move(lease.path, fenced)
            if ended or self.of(lease.owner) is None:
                for kind in _OTHER_FILES:
                    self._disk.remove_quietly(f"leases/{lease.owner}{kind}")
                return True
        return False

    def set_paused(self, owner: str, epoch: int, *, paused: bool) -> bool:
        """Store whether the owner is paused; False when it has no valid lease."""
        lease = self.of(owner)
        if lease is None or not self.is_live(lease, epoch):
            return False
        if paused:
            self._disk.replace(f"leases/{owner}.resting", b"", durable=False)
        else:
            self._disk.remove_quietly(f"leases/{owner}.resting")
        return True

    def is_paused(self, owner: str) -> bool:
        """Whether the owner is paused."""
        return self._disk.exists(f"leases/{owner}.resting")

    def has_info(self, owner: str) -> bool:
        """Whether a renewal has stored a `WorkerInfo` of the owner."""
        return self._disk.exists(f"leases/{owner}.info")

    def info(self, owner: str) -> WorkerInfo | None:
        """The `WorkerInfo` of the owner's last renewal; None when it is missing or unreadable."""
        with suppress(NotARecord):
            data = self._disk.read(f"leases/{owner}.info")
            return None if data is None else WORKER.decode(data)
        return None

    def remove_leftovers(self) -> None:
        """Remove the other files of owners that have no lease, and old fences.

        Not of other programs: one that puts the folder back writes drafts under other names, and files that
        it has yet to rename or to give their times.
        """
        alive = self.all()
        old = self._clock.micros() - _FENCE_RETENTION
        for name in self._disk.names("leases"):
            fence = _FENCED.fullmatch(name)
            if fence is not None and int(fence[3]) < old:
                self._disk.remove_quietly(f"leases/{name}")
            other = _OTHER.fullmatch(name)
            if (
                other is not None
                and other[1] not in alive
                and self._disk.is_older(f"leases/{name}", _WRITING, self._disk.disk_time())
                and self.of(other[1]) is None
            ):
                self._disk.remove_quietly(f"leases/{name}")

    def _boot(self) -> str:
        return hashlib.sha256(self._clock.boot_id().encode()).hexdigest()[:12]
