"""Shared values: small values that many processes change, by compare-and-swap made of renames.

A value is a folder with one file, named by the value's version. To change version 5, a process
writes the next value as `6.<nonce>.part` and renames `5` to `5.<nonce>.over`. Of several processes
that try, one succeeds, and from then on the part that its name points to is the value. Any process
that finds an `.over` file moves the part to `6` and removes the `.over` file. A version number is
never used twice, so a process that was suspended cannot replace a value with one based on an old
version.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from omniq.storage.file.encoding import Codec, NotARecord
from omniq.storage.file.filesystem import Disk

T = TypeVar("T")

_TRIES = 100
_ALREADY_EXISTS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Version(NamedTuple, Generic[T]):
    """A value as it was read, with its version number, which is at least 1."""

    number: int
    value: T


class SharedValues(Generic[T]):
    """The values of one folder, by name. If not `durable`, a power cut may lose them."""

    def __init__(self, disk: Disk, folder: str, codec: Codec[T], *, durable: bool) -> None:
        self._disk = disk
        self._folder = folder
        self._codec = codec
        self._is_durable = durable

    def names(self) -> list[str]:
        """The names of all values."""
        return self._disk.names(self._folder)

    def read(self, name: str) -> Version[T] | None:
        """Return the current value, or None."""
        value_folder = f"{self._folder}/{name}"
        for _ in range(_TRIES):
            names = self._disk.names(value_folder)
            if not names:
                return None
            numbers = [int(entry) for entry in names if entry.isascii() and entry.isdigit()]
            if not numbers:
                self._finish_swap(value_folder, names)
                continue
            found = self._read_version(value_folder, max(numbers))
            if found is not None:
                return found
        # Neither a value nor a part that an `.over` points to: a power cut has left this.
        self._remove(value_folder)
        return None

    def is_current(self, name: str, number: int) -> bool:
        """Whether that version is still the current one."""
        return number > 0 and self._disk.exists(f"{self._folder}/{name}/{number}")

    def swap(
        self, name: str, before: Version[T] | None, value: T, *, first: int = 1
    ) -> Version[T] | None:
        """Replace the value if its version is still `before`; returns None when it is not.

        A value that can be removed and created again needs a `first` version that it never had.
        """
        if before is None:
            return self._create(name, value, first)
        value_folder = f"{self._folder}/{name}"
        nonce, after = self._disk.nonce(), Version(before.number + 1, value)
        part, over = (
            f"{value_folder}/{after.number}.{nonce}.part",
            f"{value_folder}/{before.number}.{nonce}.over",
        )
        try:
            self._disk.write(part, self._codec.encode(value), durable=self._is_durable)
        except FileNotFoundError:
            return None
        if not self._disk.move(f"{value_folder}/{before.number}", over):
            self._disk.remove_quietly(part)
            return None
        self._disk.move(part, f"{value_folder}/{after.number}")
        if self._is_durable:
            self._disk.sync(value_folder)
        self._disk.remove_quietly(over)
        return after

    def remove(self, name: str) -> bool:
        """Delete the value; True for one of several processes that do so."""
        return self._remove(f"{self._folder}/{name}")

    def _create(self, name: str, value: T, first: int) -> Version[T] | None:
        value_folder, draft = f"{self._folder}/{name}", f"tmp/{self._disk.nonce()}.cell"
        self._disk.make_folder(draft)
        try:
            data = self._codec.encode(value)
            self._disk.write(f"{draft}/{first}", data, durable=self._is_durable)
            if self._is_durable:
                self._disk.sync(draft)
            # A folder can replace only an empty one: of several that create a value, one succeeds.
            if not self._disk.move(draft, value_folder):
                return None
        except OSError as error:
            self._disk.remove_folder(draft)
            if error.errno in _ALREADY_EXISTS:
                return None
            raise
        if self._is_durable:
            self._disk.sync(self._folder)
        return Version(first, value)

    def _read_version(self, value_folder: str, number: int) -> Version[T] | None:
        path = f"{value_folder}/{number}"
        try:
            data = self._disk.read(path)
            return None if data is None else Version(number, self._codec.decode(data))
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
            return None

    def _finish_swap(self, value_folder: str, names: list[str]) -> None:
        """Finish a swap of another process: move the part that an `.over` points to."""
        for entry in names:
            parts = entry.split(".")
            if len(parts) == 3 and parts[2] == "over" and parts[0].isascii() and parts[0].isdigit():
                number = int(parts[0]) + 1
                if self._disk.move(
                    f"{value_folder}/{number}.{parts[1]}.part", f"{value_folder}/{number}"
                ):
                    self._disk.remove_quietly(f"{value_folder}/{entry}")

    def _remove(self, value_folder: str) -> bool:
        temporary = f"tmp/{self._disk.nonce()}.cell"
        with suppress(NotADirectoryError):
            if self._disk.move(value_folder, temporary):
                self._disk.remove_folder(temporary)
                if self._is_durable:
                    self._disk.sync(self._folder)
                return True
        return False
