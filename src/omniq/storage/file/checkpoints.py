"""Checkpoints: stores the checkpoint and the progress of each task, in one folder per task.

A checkpoint's file is named by the token of the claim that saved it, so that a claim that has ended
cannot overwrite the checkpoint of a later claim.
"""

from __future__ import annotations

from omniq.clock import Clock
from omniq.models import Progress
from omniq.storage.file.encoding import CHECKPOINT, PROGRESS, Checkpoint, NotARecord
from omniq.storage.file.filesystem import Disk

_ENDING = ".checkpoint"


class Checkpoints:
    """Checkpoints and progress, `notes/<id>/`."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock

    def save(self, task_id: str, token: int, data: bytes) -> None:
        """Store the checkpoint of that claim, and delete those of earlier claims."""
        self._disk.make_folder(f"notes/{task_id}")
        path = f"notes/{task_id}/{token}{_ENDING}"
        self._disk.replace(path, CHECKPOINT.encode(Checkpoint(self._clock.micros(), data)))
        self._disk.sync("notes", f"notes/{task_id}")
        for other in self._tokens(task_id):
            if other < token:
                self._disk.remove_quietly(f"notes/{task_id}/{other}{_ENDING}")

    def load(self, task_id: str) -> Checkpoint | None:
        """Return the checkpoint of the newest claim that saved one, or None."""
        for token in sorted(self._tokens(task_id), reverse=True):
            path = f"notes/{task_id}/{token}{_ENDING}"
            try:
                data = self._disk.read(path)
                if data is not None:
                    return CHECKPOINT.decode(data)
            except NotARecord as error:
                self._disk.quarantine(path, str(error))
        return None

    def _tokens(self, task_id: str) -> list[int]:
        names = self._disk.names(f"notes/{task_id}")
        stems = [name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING)]
        return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]

    def report(self, progress: Progress) -> None:
        """Store the newest progress, without a wait for the disk: a power cut may lose it."""
        self._disk.make_folder(f"notes/{progress.task_id}")
        path = f"notes/{progress.task_id}/progress"
        self._disk.replace(path, PROGRESS.encode(progress), durable=False)

    def progress(self, task_id: str) -> Progress | None:
        """Return the newest progress, or None."""
        path = f"notes/{task_id}/progress"
        try:
            data = self._disk.read(path)
            return None if data is None else PROGRESS.decode(data)
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
            return None

    def task_ended(self, task_id: str, *, keeps_checkpoint: bool) -> None:
        """Delete the progress of a task that has ended, and perhaps its checkpoint."""
        if not self._disk.exists(f"notes/{task_id}"):
            return
        self._disk.remove_quietly(f"notes/{task_id}/progress")
        if not keeps_checkpoint:
            self.clear(task_id)

    def clear(self, task_id: str) -> None:
        """Delete the checkpoint and the progress."""
        if self._disk.exists(f"notes/{task_id}"):
            self._disk.remove_folder(f"notes/{task_id}")

    def task_ids(self) -> list[str]:
        """The ids of all tasks that have a folder here."""
        return self._disk.names("notes")
