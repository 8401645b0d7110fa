"""Small values that many processes change: compare-and-swap out of renames.

A cell is a folder with one file, named by its version. To change version 5, write the next value as
`6.<nonce>.part` and rename `5` to `5.<nonce>.over`: of many that try, one succeeds, and from then on
the value is the one its name points to. Whoever finds an `.over` moves the part to `6` and removes
it. A version never exists twice, so that a process that was asleep cannot change what it read long ago.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from omniq.storage.file.encoding import Codec, NotARecord
from omniq.storage.file.filesystem import Disk

T = TypeVar("T")

_TRIES = 100
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Version(NamedTuple, Generic[T]):
    """A cell's value as it was read. Number 0 is a cell that is not there yet."""

    number: int
    value: T


class Cells(Generic[T]):
    """The cells of one folder, by name. Not `lasting`: the value may be lost in a power cut."""

    def __init__(self, disk: Disk, folder: str, codec: Codec[T], *, lasting: bool) -> None:
        self._disk = disk
        self._folder = folder
        self._codec = codec
        self._is_lasting = lasting

    def names(self) -> list[str]:
        """The names of all cells."""
        return self._disk.names(self._folder)

    def read(self, name: str) -> Version[T] | None:
        """The value as it is now; None when there is none."""
        cell = f"{self._folder}/{name}"
        for _ in range(_TRIES):
            names = self._disk.names(cell)
            if not names:
                return None
            numbers = [int(entry) for entry in names if entry.isascii() and entry.isdigit()]
            if not numbers:
                self._help(cell, names)
                continue
            found = self._read_version(cell, max(numbers))
            if found is not None:
                return found
        # Neither a value nor one on its way: what a power cut has left of it.
        self._discard(cell)
        return None

    def is_current(self, name: str, number: int) -> bool:
        """Whether the value of that number has not been changed yet."""
        return number > 0 and self._disk.exists(f"{self._folder}/{name}/{number}")

    def swap(
        self, name: str, before: Version[T] | None, value: T, *, first: int = 1
    ) -> Version[T] | None:
        """Change the cell if it still is as it was read; None when it is not.

        A cell that may be removed and made anew counts from a `first` that was never used before.
        """
        if before is None:
            return self._create(name, value, first)
        cell = f"{self._folder}/{name}"
        nonce, after = self._disk.nonce(), Version(before.number + 1, value)
        part, over = f"{cell}/{after.number}.{nonce}.part", f"{cell}/{before.number}.{nonce}.over"
        try:
            self._disk.write(part, self._codec.encode(value), lasting=self._is_lasting)
        except FileNotFoundError:
            return None
        if not self._disk.move(f"{cell}/{before.number}", over):
            self._disk.remove_quietly(part)
            return None
        self._disk.move(part, f"{cell}/{after.number}")
        if self._is_lasting:
            self._disk.sync(cell)
        self._disk.remove_quietly(over)
        return after

    def remove(self, name: str) -> bool:
        """Forget the cell. Of many that do so, one gets True."""
        return self._discard(f"{self._folder}/{name}")

    def _create(self, name: str, value: T, first: int) -> Version[T] | None:
        cell, draft = f"{self._folder}/{name}", f"tmp/{self._disk.nonce()}.cell"
        self._disk.make_folder(draft)
        try:
            data = self._codec.encode(value)
            self._disk.write(f"{draft}/{first}", data, lasting=self._is_lasting)
            if self._is_lasting:
                self._disk.sync(draft)
            # A folder can be renamed onto an empty one only: of many that create a cell, one does.
            if not self._disk.move(draft, cell):
                return None
        except OSError as error:
            self._disk.remove_folder(draft)
            if error.errno in _TAKEN:
                return None
            raise
        if self._is_lasting:
            self._disk.sync(self._folder)
        return Version(first, value)

    def _read_version(self, cell: str, number: int) -> Version[T] | None:
        path = f"{cell}/{number}"
        try:
            data = self._disk.read(path)
            return None if data is None else Version(number, self._codec.decode(data))
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
            return None

    def _help(self, cell: str, names: list[str]) -> None:
        """Finish what somebody began: move the part that an `.over` points to."""
        for entry in names:
            parts = entry.split(".")
            if len(parts) == 3 and parts[2] == "over" and parts[0].isascii() and parts[0].isdigit():
                number = int(parts[0]) + 1
                if self._disk.move(f"{cell}/{number}.{parts[1]}.part", f"{cell}/{number}"):
                    self._disk.remove_quietly(f"{cell}/{entry}")

    def _discard(self, cell: str) -> bool:
        grave = f"tmp/{self._disk.nonce()}.cell"
        with suppress(NotADirectoryError):
            if self._disk.move(cell, grave):
                self._disk.remove_folder(grave)
                if self._is_lasting:
                    self._disk.sync(self._folder)
                return True
        return False
