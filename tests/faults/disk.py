"""A disk whose power can be cut: an ext4 file system in a file, shut down while it is in use.

Data that reached the device before the cut stays, in the order in which the kernel sent it; data
that was only in memory is gone, as is an unfinished journal commit. The device has no volatile
cache, so a cut reveals a missing or misplaced fsync, but not a drive that ignores one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

_EXT4_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_DETACH = 2
_DIE_WITH_PARENT = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """This machine cannot cut the power of a disk; the text says what is missing."""


class Disk:
    """A mounted ext4 file system on a loop device. Leaving it unmounts and removes everything.

    `scratch` is a folder beside the image that a cut does not touch.
    """

    def __init__(self, megabytes: int = 192) -> None:
        self._megabytes = megabytes
        self._device = ""
        self._is_mounted = False

    def __enter__(self) -> Self:
        _check_tools()
        self._folder = Path(tempfile.mkdtemp(prefix="omniq-disk-", dir=_quick_folder()))
        self.root = self._folder / "mnt"
        self.scratch = self._folder / "scratch"
        self.root.mkdir()
        self.scratch.mkdir()
        try:
            self._create()
            self._mount()
            self._rehearse()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def cut(self) -> None:
        """Stop the file system now, even if processes write; every later write fails."""
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, _EXT4_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(handle)

    def restart(self) -> None:
        """Mount again, as after a reboot. Every process that used the disk must have ended."""
        self._unmount()
        self._mount()

    def _create(self) -> None:
        image = self._folder / "image"
        with image.open("wb") as file:
            file.truncate(self._megabytes << 20)
        _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-N", "65536", "-J", "size=8", str(image))
        self._device = _run("losetup", "--find", "--show", str(image))

    def _mount(self) -> None:
        where = os.fsencode(self.root)
        if _libc.mount(self._device.encode(), where, b"ext4", 0, b"commit=1"):
            code = ctypes.get_errno()
            raise Unavailable(f"cannot mount {self._device}: {os.strerror(code)}")
        self._is_mounted = True

    def _unmount(self) -> None:
        deadline = time.monotonic() + 10
        while _libc.umount2(os.fsencode(self.root), 0):
            code = ctypes.get_errno()
            # A killed process may still be closing its files.
            if code != errno.EBUSY or time.monotonic() > deadline:
                raise OSError(code, f"umount {self.root}: {os.strerror(code)}")
            time.sleep(0.001)
        self._is_mounted = False

    def _rehearse(self) -> None:
        try:
            self.cut()
        except OSError as error:
            raise Unavailable(f"the ext4 shutdown call is refused: {error.strerror}") from error
        self.restart()

    def _remove(self) -> None:
        if self._is_mounted:
            # Detached at once, freed when the last user has gone.
            _libc.umount2(os.fsencode(self.root), _DETACH)
        if self._device:
            subprocess.run(["losetup", "--detach", self._device], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def spawn(role: Callable[[], None]) -> int:
    """Run `role` in a fork of this process and return its pid.

    It forks because starting Python and importing omniq takes longer than the rest of a cut.
    The parent must have no threads. Status 0 means that `role` returned.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getppid() == parent:
            role()
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def has_ended(pid: int) -> bool:
    """Whether the process has ended by itself; the caller must still wait for it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(pid: int) -> int:
    """Kill the process if it still runs, wait for its end, and return its exit status."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise Unavailable("mounting a file system needs root")
    for tool in ("mkfs.ext4", "losetup"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed")


def _quick_folder() -> str | None:
    """Return a folder in memory with enough space, if there is one: a cut needs no real disk."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > 1 << 30:
        return str(shared)
    return None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{command[0]}: {error.stderr.strip()}") from error
    return done.stdout.strip()
