"""File system: the system calls on the store's folder; which are atomic, and which are durable.

Every path is relative to the store's folder, which is open as one file descriptor. Two calls decide
races: `move` (rename: of several processes that move one file, one succeeds) and `link` (of several
processes that create one name, one succeeds). Nothing here waits for another process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omniq.errors import StorageError
from omniq.storage.file.encoding import HEADER_SIZE, Kind, NotARecord, declared_size
from omniq.storage.file.shared_file import find_record, size_by_header
from omniq.storage.permissions import refuse_shared

FOLDERS = ("parts", "results", "dead", "leases", "tmp", "corrupt")
_NETWORK_TYPES = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs", "vboxsf"),
        *("fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"),
    )
)
_MAX_OPEN = 64
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGE = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)
_NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST_NAME = 180


class Disk:
    """The store's folder. `is_durable`: whether `write` and `sync` wait for the disk."""

    def __init__(self, root: Path, *, is_durable: bool, nonce_prefix: str) -> None:
        self.root = root
        self.is_durable = is_durable
        self.own_prefix = f"{nonce_prefix}-"
        """What the nonces of this object begin with."""
        self._count = 0
        self._fd = -1

    def open(self) -> None:
        """Create the folders that are missing, and check that the file system is suitable."""
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            _make_folder(self.root)
            refuse_network(self.root)
            self._fd = os.open(self.root, _ROOT)
            refuse_shared(self.root)
            for folder in FOLDERS:
                _make_folder(folder, dir_fd=self._fd)
                refuse_shared(self.root / folder)
            if self.is_durable:
                self._sync_folder(".")
            self._check_file_system()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close; does nothing when called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def nonce(self) -> str:
        """Return a string that no other process, and no earlier call, has used."""
        self._count += 1
        return f"{self.own_prefix}{self._count:x}"

    # Reading

    def read(self, path: str) -> bytes | None:
        """Return the file's contents; None when it is missing.

        Raises `NotARecord` when it is not a regular file.
        """
        try:
            fd = os.open(path, _READ, dir_fd=self._fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise NotARecord("not a regular file") from error
            raise
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise NotARecord("not a regular file")
            return _read_whole(fd, facts.st_size)
        finally:
            os.close(fd)

    def exists(self, path: str) -> bool:
        """Whether the path exists."""
        return os.access(path, os.F_OK, dir_fd=self._fd, follow_symlinks=False)

    def is_folder(self, path: str) -> bool:
        """Whether the path is a folder."""
        try:
            return stat.S_ISDIR(os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def inode(self, path: str) -> int:
        """The inode number of a file; 0 when it is missing."""
        try:
            return os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def names(self, folder: str) -> list[str]:
        """The names in a folder; none when it is missing."""
        return [name for name, _ in self.scan(folder)]

    def scan(self, folder: str) -> list[tuple[str, int]]:
        """The names in a folder with their inode numbers.

        Something other than a folder under that path is moved to `corrupt/`.
        """
        try:
            fd = os.open(folder, _FOLDER, dir_fd=self._fd)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno not in _NOT_A_FOLDER:
                raise
            self.quarantine(folder, "not a folder")
            return []
        try:
            with os.scandir(fd) as entries:
                return [(entry.name, entry.inode()) for entry in entries]
        finally:
            os.close(fd)

    def changed_at(self, path: str) -> int:
        """The modification time of a folder or file, by the file system's clock."""
        return os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_mtime_ns

    def touch(self, path: str) -> None:
        """Set the modification time of a file to now, if it exists."""
        with suppress(FileNotFoundError):
            os.utime(path, dir_fd=self._fd, follow_symlinks=False)

    def disk_time(self) -> int:
        """The current time of the file system's clock, in nanoseconds."""
        path = f"tmp/{self.nonce()}.tmp"
        fd = os.open(path, _CREATE, 0o600, dir_fd=self._fd)
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
            self.remove_quietly(path)

    # Writing

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Create a file; a call that fails leaves none behind.

        A file that is not `durable` may be empty after a power cut, also in a durable store.
        """
        self._write([((path,), data)], is_synced=self.is_durable and durable)

    def write_all(self, files: Sequence[tuple[Sequence[str], bytes]]) -> None:
        """Create files with one or more names each; a call that fails leaves none behind."""
        self._write(files, is_synced=self.is_durable)

    def _write(self, files: Sequence[tuple[Sequence[str], bytes]], *, is_synced: bool) -> None:
        created: list[str] = []
        waiting: list[int] = []
        try:
            for (path, *others), data in files:
                fd = self._create(path, waiting)
                created.append(path)
                waiting.append(fd)
                _write_whole(fd, data)
                # Before the sync, which then makes these names and the contents durable together.
                for other in others:
                    os.link(path, other, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                    created.append(other)
                if not is_synced:
                    os.close(waiting.pop())
                    continue
                _start_writeback(fd)
                if len(waiting) >= _MAX_OPEN:
                    _sync_and_close(waiting)
            _sync_and_close(waiting)
        except BaseException:
            # A failed sync is final: the kernel may drop the data, and reports it only once.
            for fd in waiting:
                os.close(fd)
            for path in created:
                self.remove_quietly(path)
            raise

    def _create(self, path: str, waiting: list[int]) -> int:
        try:
            return os.open(path, _CREATE, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno != errno.EMFILE or not waiting:
                raise
            _sync_and_close(waiting)
            return os.open(path, _CREATE, 0o600, dir_fd=self._fd)

    def write_new(self, path: str) -> None:
        """Create an empty file, unless the name exists."""
        with suppress(FileExistsError):
            os.close(os.open(path, _CREATE, 0o600, dir_fd=self._fd))

    def link_to_itself(self, path: str) -> None:
        """Make a symbolic link that cannot be followed, unless the name exists."""
        with suppress(FileExistsError):
            os.symlink(path, path, dir_fd=self._fd)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Create or replace a file atomically."""
        temporary = f"tmp/{self.nonce()}.tmp"
        self.write(temporary, data, durable=durable)
        try:
            os.rename(temporary, path, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove_quietly(temporary)
            raise

    def make_folder(self, path: str) -> None:
        """Create a folder unless it exists."""
        _make_folder(path, dir_fd=self._fd)

    def sync(self, *folders: str) -> None:
        """In a durable store, wait until the names in these folders are on the disk."""
        if self.is_durable:
            for folder in folders:
                self._sync_folder(folder)

    def _sync_folder(self, folder: str) -> None:
        fd = os.open(folder, _FOLDER, dir_fd=self._fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # Names

    def move(self, source: str, target: str) -> bool:
        """Rename. False when the source is missing: another process has moved it."""
        try:
            os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def move_folder(self, source: str, target: str) -> bool:
        """Rename a folder. False when the target exists and is not empty."""
        try:
            os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def move_quietly(self, source: str, target: str) -> None:
        """Rename, ignoring errors: another process will."""
        with suppress(OSError):
            self.move(source, target)

    def link(self, source: str, target: str) -> bool:
        """Add a name to the file. False when that name exists."""
        try:
            os.link(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        except FileExistsError:
            return False
        return True

    def remove(self, path: str) -> bool:
        """Remove a file. False when it is missing, or is a folder."""
        try:
            os.unlink(path, dir_fd=self._fd)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def remove_quietly(self, path: str) -> None:
        """Remove a file, ignoring errors: it does no harm if it stays."""
        with suppress(OSError):
            os.unlink(path, dir_fd=self._fd)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder, ignoring errors."""
        with suppress(OSError):
            os.rmdir(path, dir_fd=self._fd)

    def erase(self, path: str, key: str) -> None:
        """Remove a name; if other records are in the same file, overwrite the one with that key first.

        Without this, the arguments of a deleted task would be readable until the last task of its
        file is deleted.
        """
        with suppress(NotARecord, FileNotFoundError):
            fd = os.open(path, _CHANGE, dir_fd=self._fd)
            try:
                facts = os.fstat(fd)
                if stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1:
                    place = find_record(_read_whole(fd, facts.st_size), key)
                    if place is not None and place[0] + place[1] <= facts.st_size:
                        os.pwrite(fd, bytes(place[1]), place[0])
            finally:
                os.close(fd)
        self.remove(path)

    def quarantine(self, path: str, why: str) -> None:
        """Move a file that is not a record to `corrupt/`, with a file that gives the reason.

        Of several processes that do so, one succeeds; the others do nothing.
        """
        name = _UNSAFE.sub("_", path.replace("/", "."))[:_LONGEST_NAME]
        target = f"corrupt/{name}.{self.nonce()}"
        if self.move(path, target):
            with suppress(OSError):
                note = f"{path}: {why}\n".encode("utf-8", "backslashreplace")
                self.write(f"{target}.reason", note)

    # Checking the file system

    def _check_file_system(self) -> None:
        """Refuse a file system without atomic rename and exclusive link."""
        source, target = f"tmp/{self.nonce()}.tmp", f"tmp/{self.nonce()}.tmp"
        self.write(source, b"")
        try:
            if not self.link(source, target) or self.link(source, target):
                raise StorageError(f"{self.root}: this file system cannot link files exclusively")
            if not self.move(source, source + "x") or self.move(source, source + "x"):
                raise StorageError(f"{self.root}: this file system cannot rename files atomically")
        except OSError as error:
            raise StorageError(
                f"{self.root}: this file system cannot link and rename files: {error}"
            ) from error
        finally:
            for path in (source, target, source + "x"):
                self.remove_quietly(path)


def _make_folder(path: str | Path, *, dir_fd: int | None = None) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=dir_fd)


def refuse_network(root: Path) -> None:
    """Refuse a folder on a network file system: rename and link guarantee less there."""
    device = os.stat(root).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted and rest.split()[0] in _NETWORK_TYPES:
            raise StorageError(
                f"{root} is on a network file system ({rest.split()[0]}); the file storage needs a "
                "local disk: use PostgreSQL or Redis to share tasks between machines"
            )


def _read_whole(fd: int, size: int) -> bytes:
    data = os.read(fd, min(size, 65_536))
    if len(data) == size:
        return data
    # Do not read a file whose size differs from its header: it may be gigabytes of other data.
    if len(data) >= HEADER_SIZE:
        if data[5] == Kind.SHARED:
            data += _read_up_to(fd, min(declared_size(data), size) - len(data))
        if size_by_header(data) != size:
            raise NotARecord(f"{size} bytes long, where its header says {size_by_header(data)}")
    return data + _read_up_to(fd, size - len(data))


def _read_up_to(fd: int, size: int) -> bytes:
    chunks: list[bytes] = []
    while size > 0 and (chunk := os.read(fd, min(size, 1 << 20))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _write_whole(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def _sync_and_close(waiting: list[int]) -> None:
    while waiting:
        os.fsync(waiting[-1])
        os.close(waiting.pop())


def _find_writeback() -> Callable[[int], Any] | None:
    """Return `sync_file_range`, which starts writing one file while the next is being created."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    write_out = 2
    return lambda fd: call(fd, 0, 0, write_out)


_writeback = _find_writeback()


def _start_writeback(fd: int) -> None:
    if _writeback is not None:
        # Its errors are ignored: durability comes from the sync that follows.
        _writeback(fd)
