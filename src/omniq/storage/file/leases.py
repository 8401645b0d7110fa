"""Which owners are alive: one file each, whose name says until when.

`workers/<owner>.<boot>.<until>.lease`. To renew is to rename it to a later instant, to fence is to
remove it under the name that was read: if the owner has renewed meanwhile, that name is gone and it
is not fenced; if it was fenced, there is nothing left to rename. No owner without a file comes back.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import NamedTuple

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.models import WorkerInfo
from omniq.storage.file.encoding import WORKER, NotARecord
from omniq.storage.file.filesystem import Disk

_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.([0-9a-f]{12})\.(\d{1,19})\.lease")
_BESIDE = (".info", ".resting")
"""What else there is of an owner: who it is, and that it is paused."""

_LOOKS = 4
_TRIES = 20


class Lease(NamedTuple):
    """An owner's lease; `until` is by the boot clock of the boot named."""

    owner: str
    boot: str
    until: int

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"workers/{self.owner}.{self.boot}.{self.until}.lease"


class Leases:
    """All leases of the store."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock

    def all(self) -> dict[str, Lease]:
        """Every lease that there is, ended or not, by owner."""
        found: dict[str, Lease] = {}
        for name in self._disk.names("workers"):
            match = _NAME.fullmatch(name)
            if match is not None:
                lease = Lease(match[1], match[2], int(match[3]))
                if lease.owner not in found or found[lease.owner].until < lease.until:
                    found[lease.owner] = lease
        return found

    def of(self, owner: str) -> Lease | None:
        """The owner's lease, ended or not."""
        for _ in range(_LOOKS):
            # A lease that is renamed while the folder is listed may be missed, so one look is no proof.
            lease = self.all().get(owner)
            if lease is not None:
                return lease
        return None

    def is_live(self, lease: Lease) -> bool:
        """Whether it has not ended."""
        return lease.boot == self._boot() and lease.until > self._clock.boot_micros()

    def renew(self, info: WorkerInfo, duration: int, *, is_first: bool) -> Lease:
        """Let the lease last that long from now; `LeaseLost` when the owner was fenced."""
        lease = self._renew(info.id, duration, is_first)
        self._disk.replace(f"workers/{info.id}.info", WORKER.encode(info), lasting=False)
        return lease

    def _renew(self, owner: str, duration: int, is_first: bool) -> Lease:
        for _ in range(_TRIES):
            after = Lease(owner, self._boot(), self._clock.boot_micros() + duration)
            before = self.of(owner)
            if before is None:
                if not is_first:
                    break
                self._disk.write(after.path, b"", lasting=False)
                return after
            if before == after or self._disk.move(before.path, after.path):
                return after
        raise LeaseLost(owner)

    def end(self, lease: Lease) -> bool:
        """Fence the owner, unless it has renewed meanwhile; whether it has no lease now."""
        with suppress(IsADirectoryError, PermissionError):
            ended = self._disk.remove(lease.path)
            if ended or self.of(lease.owner) is None:
                for kind in _BESIDE:
                    self._disk.remove_quietly(f"workers/{lease.owner}{kind}")
                return True
        return False

    def set_paused(self, owner: str, *, paused: bool) -> bool:
        """Note whether the owner is to claim; False when it has no lease."""
        lease = self.of(owner)
        if lease is None or not self.is_live(lease):
            return False
        if paused:
            self._disk.replace(f"workers/{owner}.resting", b"", lasting=False)
        else:
            self._disk.remove_quietly(f"workers/{owner}.resting")
        return True

    def is_paused(self, owner: str) -> bool:
        """Whether the owner is to claim nothing."""
        return self._disk.exists(f"workers/{owner}.resting")

    def info(self, owner: str) -> WorkerInfo | None:
        """What the owner said of itself when it last renewed."""
        with suppress(NotARecord):
            data = self._disk.read(f"workers/{owner}.info")
            return None if data is None else WORKER.decode(data)
        return None

    def sweep(self) -> None:
        """Remove what owners without a lease have left."""
        alive = self.all()
        for name in self._disk.names("workers"):
            owner = name.removesuffix(_BESIDE[0]).removesuffix(_BESIDE[1])
            if owner != name and owner not in alive and self.of(owner) is None:
                self._disk.remove_quietly(f"workers/{name}")

    def _boot(self) -> str:
        return hashlib.sha256(self._clock.boot_id().encode()).hexdigest()[:12]
