"""Wake-ups: reports which names have appeared and disappeared in a folder, by Linux's inotify.

The kernel queues an event in the system call that makes the change, before that call returns and
while the folder is locked. So after a call of this process in the same folder has returned, the
events of all earlier changes are in the queue.
"""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from contextlib import suppress

_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x1000000
_EVENT = struct.Struct("=iIII")
_BUFFER = 65_536
_LARGEST_EVENT = 512

Event = tuple[bool, str]
"""Whether the name has appeared (True) or disappeared (False), and the name."""


class FolderWatch:
    """An inotify watch on one folder. `fd` is readable when there are events."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # For a storage that is dropped without being closed: a user may have 128 watches.
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False

    @classmethod
    def open(cls, folder: int) -> FolderWatch | None:
        """Return a watch on an open folder; None when inotify is missing or its limits are reached."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            return None
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        # Not IN_MOVED_FROM: a rename within the folder also reports the new name.
        mask = _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_ONLYDIR
        if libc.inotify_add_watch(fd, f"/proc/self/fd/{folder}".encode(), mask) < 0:
            os.close(fd)
            return None
        return cls(fd)

    def close(self) -> None:
        """Close; does nothing when called again."""
        self._close()
        self.fd = -1

    def read(self) -> list[Event] | None:
        """Return the events in order; None when some were lost and the folder must be listed."""
        events: list[Event] = []
        with suppress(BlockingIOError):
            while data := os.read(self.fd, _BUFFER):
                if not _parse(data, events):
                    self._skip()
                    return None
                if len(data) < _BUFFER - _LARGEST_EVENT:
                    # Another event would have fitted: there was none.
                    break
        return events

    def _skip(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.fd, _BUFFER):
                pass


def _parse(data: bytes, events: list[Event]) -> bool:
    """Append the events in `data`; False when some were lost."""
    offset = 0
    while offset < len(data):
        _, mask, _, length = _EVENT.unpack_from(data, offset)
        offset += _EVENT.size
        if mask & (_IN_Q_OVERFLOW | _IN_IGNORED):
            return False
        name = data[offset : offset + length].rstrip(b"\0")
        offset += length
        events.append((not mask & _IN_DELETE, name.decode("utf-8", "surrogateescape")))
    return True
