"""File system: the system calls on the store's folder; which are atomic, and which are durable.

Every path is relative to the store's folder. Each folder is opened once, without following a link, and
checked by its descriptor; after that, every call is relative to the descriptor, so that a folder that
is replaced by a link leads nowhere else. Two calls decide races: `move` (rename: of several processes
that move one file, one succeeds) and `link` (of several processes that create one name, one succeeds).
Nothing here waits for another process.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from omniq.errors import StorageError, StorageRefused
from omniq.settings.places import PlaceRules
from omniq.storage.backend import Moved
from omniq.storage.file.encoding import HEADER_SIZE, Kind, NotARecord, declared_size
from omniq.storage.file.shared_file import open_shared
from omniq.storage.permissions import make_store_folder

FOLDERS = ("tasks", "parts", "results", "dead", "leases", "tmp", "corrupt")
_NETWORK_TYPES = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs", "vboxsf"),
        *("fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"),
    )
)
_NO_LIMIT = re.compile(r"(tasks|parts)/gate~|tasks/[^.]+\.done$")
"""The paths of files that may be of any size: a rate limit has many starts. A write that changes it may have
them in the file of its marker, too.
"""

_MAX_UNSYNCED = 64
"""Files that are written before the first of them is synced."""

_MAX_OLD_FOLDERS = 16
"""Folders of older versions that are open at the same time."""

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGE = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST_NAME = 180


class Disk:
    """The store's folder. `is_durable`: whether `write` and `sync` wait for the disk.

    `rules`: which owners and modes the folders may have. `largest`: bytes of a file that is read, at most.
    """

    def __init__(
        self, root: Path, *, is_durable: bool, rules: PlaceRules, nonce_prefix: str, largest: int
    ) -> None:
        self.root = root
        self._largest = largest
        self.is_durable = is_durable
        self._rules = rules
        self.own_prefix = f"{nonce_prefix}-"
        """What the nonces of this object begin with."""
        self._count = 0
        self._folders: dict[str, int] = {}
        # For a storage that is dropped without being closed.
        weakref.finalize(self, _close_folders, self._folders).atexit = False

    def open(self, known: tuple[int, int] | None = None) -> tuple[int, int]:
        """Create the folders that are missing, and check that the file system is suitable.

        Returns the device and the inode of the folder. If `known`, it must be that folder: none is created.
        """
        try:
            if known is None:
                make_store_folder(self.root, self._rules)
            try:
                root = self._folders[""] = os.open(self.root, _ROOT)
            except FileNotFoundError:
                self._refuse_replaced(self.root)
            facts = os.fstat(root)
            self._rules.check(facts, self.root)
            if known not in (None, (facts.st_dev, facts.st_ino)):
                self._refuse_replaced(self.root)
            refuse_network(self.root, os.fstat(root).st_dev)
            for folder in FOLDERS:
                self.make_folder(folder)
                self.folder(folder)
            self.sync("")
            self._check_file_system()
        except BaseException:
            self.close()
            raise
        return facts.st_dev, facts.st_ino

    def close(self) -> None:
        """Close; does nothing when called again."""
        _close_folders(self._folders)

    def folder(self, path: str) -> int:
        """The descriptor of a folder, which is opened once."""
        known = self._folders.get(path)
        if known is not None:
            return known
        parent, name = self._place(path)
        try:
            fd = os.open(name, _FOLDER, dir_fd=parent)
        except NotADirectoryError as error:
            raise StorageRefused(
                f"{self.root / path} is not a folder; the file storage follows no links inside of its "
                "folder: move the folder itself to this place"
            ) from error
        try:
            self._rules.check(os.fstat(fd), self.root / path)
            self._close_old_folders()
        except BaseException:
            os.close(fd)
            raise
        self._folders[path] = fd
        return fd

    def _close_old_folders(self) -> None:
        old = [path for path in self._folders if path not in ("", *FOLDERS)]
        if len(old) >= _MAX_OLD_FOLDERS:
            os.close(self._folders.pop(old[0]))

    def _place(self, path: str) -> tuple[int, str]:
        """The descriptor of the folder in which the path is, and the last part of the path."""
        folder, _, name = path.rpartition("/")
        try:
            return self._folders[folder], name
        except KeyError:
            return self.folder(folder), name

    def check_folders(self) -> None:
        """Raise `StorageError` if a folder was moved away or replaced while it was open."""
        for path in ("", *FOLDERS):
            place = self.root / path
            try:
                is_same = os.path.samestat(os.stat(place), os.fstat(self.folder(path)))
            except FileNotFoundError:
                is_same = False
            if not is_same:
                self._refuse_replaced(place)

    def _refuse_replaced(self, place: Path) -> NoReturn:
        raise StorageError(
            f"{place} was moved or replaced while it was in use; restart the processes that use it"
        )

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
            folder, name = self._place(path)
            fd = os.open(name, _READ, dir_fd=folder)
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
            if facts.st_size > self._largest and not _NO_LIMIT.match(path):
                raise NotARecord(
                    f"{facts.st_size} bytes long, and at most {self._largest} are read"
                )
            return _read_whole(fd, facts.st_size)
        finally:
            os.close(fd)

    def exists(self, path: str) -> bool:
        """Whether the path exists."""
        folder, name = self._place(path)
        return os.access(name, os.F_OK, dir_fd=folder, follow_symlinks=False)

    def stat(self, path: str) -> os.stat_result | None:
        """The facts of a file, link or folder; None when it is missing."""
        try:
            folder, name = self._place(path)
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_folder(self, path: str) -> bool:
        """Whether the path is a folder."""
        facts = self.stat(path)
        return facts is not None and stat.S_ISDIR(facts.st_mode)

    def names(self, folder: str) -> list[str]:
        """The names in a folder; none when it is missing."""
        return [name for name, _ in self.scan(folder)]

    def scan(self, folder: str) -> list[tuple[str, int]]:
        """The names in a folder with their inode numbers; none when it is missing."""
        try:
            # Opened again, because a listing moves the position of a descriptor.
            fd = os.open(".", _FOLDER, dir_fd=self.folder(folder))
        except FileNotFoundError:
            return []
        try:
            with os.scandir(fd) as entries:
                return [(entry.name, entry.inode()) for entry in entries]
        finally:
            os.close(fd)

    def folder_changed_at(self, folder: str) -> int:
        """The modification time of a folder, by the file system's clock."""
        return os.fstat(self.folder(folder)).st_mtime_ns

    def is_older(self, path: str, age: int, now: int) -> bool:
        """Whether a file exists, and was last changed more than `age` nanoseconds before `now`."""
        facts = self.stat(path)
        return facts is not None and now - facts.st_mtime_ns > age

    def disk_time(self) -> int:
        """The current time of the file system's clock, in nanoseconds."""
        path = f"tmp/{self.nonce()}.tmp"
        fd = self._create(path)
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
        self.write_all([((path,), data)], durable=durable)

    def write_all(
        self, files: Sequence[tuple[Sequence[str], bytes]], *, durable: bool = True
    ) -> None:
        """Create files with one or more names each; a call that fails leaves none behind.

        Raises `Moved` if another process has removed the first name of a file meanwhile.
        """
        is_synced = self.is_durable and durable
        created: list[str] = []
        unsynced: list[int] = []
        try:
            for (path, *others), data in files:
                unsynced.append(self._create(path))
                created.append(path)
                _write_whole(unsynced[-1], data)
                # Before the sync, which then makes these names and the contents durable together.
                for other in others:
                    if not self.link(path, other):
                        raise Moved
                    created.append(other)
                if not is_synced or len(unsynced) >= _MAX_UNSYNCED:
                    _close(unsynced, is_synced=is_synced)
            _close(unsynced, is_synced=is_synced)
        except BaseException:
            # A failed sync is final: the kernel may drop the data, and reports it only once.
            _close(unsynced, is_synced=False)
            for path in created:
                self.remove_quietly(path)
            raise

    def _create(self, path: str) -> int:
        folder, name = self._place(path)
        return os.open(name, _CREATE, 0o600, dir_fd=folder)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Create or replace a file atomically."""
        temporary = f"tmp/{self.nonce()}.tmp"
        self.write(temporary, data, durable=durable)
        try:
            self.move(temporary, path)
        except BaseException:
            self.remove_quietly(temporary)
            raise

    def make_folder(self, path: str) -> None:
        """Create a folder unless it exists."""
        parent, name = self._place(path)
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)

    def sync(self, *folders: str) -> None:
        """In a durable store, wait until the names in these folders are on the disk."""
        if self.is_durable:
            for folder in folders:
                os.fsync(self.folder(folder))

    # Names

    def move(self, path: str, target: str) -> bool:
        """Rename. False when the source is missing: another process has moved it."""
        try:
            (fd, name), (to_fd, to_name) = self._place(path), self._place(target)
            os.rename(name, to_name, src_dir_fd=fd, dst_dir_fd=to_fd)
        except FileNotFoundError:
            return False
        return True

    def move_quietly(self, source: str, target: str) -> None:
        """Rename, ignoring errors: another process will."""
        with suppress(OSError):
            self.move(source, target)

    def link(self, path: str, target: str) -> bool:
        """Add a name to the file. False when that name exists, or the file is gone."""
        (fd, name), (to_fd, to_name) = self._place(path), self._place(target)
        try:
            os.link(name, to_name, src_dir_fd=fd, dst_dir_fd=to_fd, follow_symlinks=False)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def link_to_itself(self, path: str) -> None:
        """Make a symbolic link that cannot be followed, unless the name exists."""
        folder, name = self._place(path)
        with suppress(FileExistsError):
            os.symlink(name, name, dir_fd=folder)

    def remove(self, path: str) -> bool:
        """Remove a file. False when it is missing, or is a folder."""
        try:
            folder, name = self._place(path)
            os.unlink(name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def remove_quietly(self, path: str) -> None:
        """Remove a file, ignoring errors: it does no harm if it stays."""
        with suppress(OSError):
            self.remove(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder, ignoring errors."""
        parent, name = self._place(path)
        with suppress(OSError):
            os.rmdir(name, dir_fd=parent)

    def erase(self, path: str, key: str) -> None:
        """Remove a name; if other records are in the same file, overwrite the one with that key first.

        Without this, the arguments of a deleted task would be readable until the last task of its
        file is deleted.
        """
        folder, name = self._place(path)
        with suppress(NotARecord, FileNotFoundError):
            fd = os.open(name, _CHANGE, dir_fd=folder)
            try:
                facts = os.fstat(fd)
                if stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1:
                    file = open_shared(_read_whole(fd, facts.st_size))
                    start, size = (0, 0) if file is None else file.find(key)
                    if start + size <= facts.st_size:
                        os.pwrite(fd, bytes(size), start)
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
            is_exclusive = self.link(source, target) and not self.link(source, target)
            is_atomic = self.move(source, source + "x") and not self.move(source, source + "x")
        except OSError as error:
            raise StorageError(
                f"{self.root}: this file system cannot link and rename files: {error}"
            ) from error
        finally:
            for path in (source, target, source + "x"):
                self.remove_quietly(path)
        if not (is_exclusive and is_atomic):
            raise StorageError(
                f"{self.root}: this file system cannot link files exclusively and rename them atomically"
            )


def refuse_network(root: Path, device: int) -> None:
    """Refuse a folder on a network file system: rename and link guarantee less there."""
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
    with open(fd, "rb", closefd=False) as file:
        if len(data) >= HEADER_SIZE:
            declared = declared_size(data)
            if data[5] == Kind.SHARED:
                data += file.read(max(0, min(declared, size) - len(data)))
                shared = open_shared(data)
                declared = declared if shared is None else shared.size
            if declared != size:
                raise NotARecord(f"{size} bytes long, where its header says {declared}")
        return data + file.read(size - len(data))


def _write_whole(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def _close_folders(folders: dict[str, int]) -> None:
    while folders:
        os.close(folders.popitem()[1])


def _close(files: list[int], *, is_synced: bool) -> None:
    while files:
        if is_synced:
            os.fsync(files[-1])
        os.close(files.pop())
