"""The messages between a worker and its child processes: codec bytes, never plain pickles."""

from __future__ import annotations

import struct
from datetime import datetime
from typing import Any

import msgspec

from omniq.errors import OmniqError
from omniq.log import LogConfig
from omniq.models import Progress, TaskError
from omniq.serialization import (
    CloudpickleSerializer,
    MsgspecSerializer,
    Serializer,
    internal_decoder,
)
from omniq.tasks.control import Discard, Retry, Signal, Snooze, Suspend
from omniq.tasks.error_rules import ErrorRules, path_of_rule, rule_at
from omniq.worker.executors.process_enqueue import EnqueueRequest, TaskQuestion
from omniq.worker.executors.process_flows import FlowRequest

HEADER = struct.Struct(">I")
"""Precedes each message: its length."""

SLACK = 1024 * 1024
"""How much larger than a result a message may be: a traceback is bounded, but not small."""

_MAX_REASON = 1000


class Unserialisable(OmniqError):
    """The function returned a value that cannot be encoded."""

    def __init__(self, error: TaskError) -> None:
        super().__init__(error.message)
        self.error = error


class EncodedRules(msgspec.Struct, frozen=True):
    """A worker's error rules, by the import paths of the exceptions and functions in them."""

    transient: list[str]
    permanent: list[str]
    http: bool
    only_transient: bool | None

    @classmethod
    def of(cls, rules: ErrorRules) -> EncodedRules:
        """Raises `InvalidTask` for a rule that another process could not find."""
        return cls(
            [path_of_rule(rule) for rule in rules.transient],
            [path_of_rule(rule) for rule in rules.permanent],
            rules.http,
            rules.only_transient,
        )

    def rules(self) -> ErrorRules:
        return ErrorRules(
            transient=tuple(rule_at(path) for path in self.transient),
            permanent=tuple(rule_at(path) for path in self.permanent),
            http=self.http,
            only_transient=self.only_transient,
        )


class ChildConfig(msgspec.Struct, frozen=True):
    """The first message to a child: how to find functions, and how to decode tasks.

    `pickle_key` signs pickles on this one socket; it is not the key of the storage. `settings` are
    those that tasks are built by which a task enqueues. `lifespan` is the path of the worker's, and
    `why_no_state` says why the child has none.
    """

    path: list[str]
    max_payload: int
    pickle_key: str | None
    settings: dict[str, Any]
    rules: EncodedRules | None = None
    log: LogConfig | None = None
    lifespan: str | None = None
    why_no_state: str | None = None

    def codec(self) -> Serializer:
        """The codec of tasks and results. Its limit is above that of the storage: a claimed task is
        larger than it was when it was enqueued."""
        limit = self.max_payload + SLACK // 2
        if self.pickle_key is None:
            return MsgspecSerializer(max_payload=limit)
        return CloudpickleSerializer(self.pickle_key, max_payload=limit)


class RunRequest(msgspec.Struct, frozen=True):
    """Asks a child to run one task; or, of a batched function, that one and `others` in one call.

    `ahead`: how far the store's time is ahead of the boot clock, which the child shares, in microseconds.
    `function`: the path of the task's function. The task may have a name, of which the worker knows
    the function.
    """

    task: bytes
    timeout: float | None
    ahead: int
    function: str
    others: list[bytes] = []


class SignalRecord(msgspec.Struct, frozen=True):
    """A `Retry`, `Snooze`, `Discard` or `Suspend` that the task raised, or a subclass of one."""

    kind: str
    delay: float | None
    reason: str
    on: tuple[str, ...] = ()
    enough: int | None = None
    until: datetime | None = None

    @classmethod
    def of(cls, raised: Signal) -> SignalRecord:
        reason = TaskError.from_exception(raised).message[:_MAX_REASON]
        match raised:
            case Snooze():
                return cls("snooze", float(raised.delay), str(raised.reason)[:_MAX_REASON])
            case Discard():
                return cls("discard", None, reason)
            case Suspend():
                return cls("suspend", None, reason, raised.on, raised.enough, raised.until)
            case _:
                delay = getattr(raised, "delay", None)
                return cls("retry", None if delay is None else float(delay), reason)

    def to_signal(self) -> Signal:
        match self.kind:
            case "snooze":
                return Snooze(self.delay or 0, reason=self.reason)
            case "discard":
                return Discard(self.reason)
            case "suspend":
                return Suspend(self.on, enough=self.enough, until=self.until)
            case _:
                return Retry(self.reason, delay=self.delay)


class CheckpointRequest(msgspec.Struct, frozen=True):
    """A child asks for the task's checkpoint; or to store this one, if it is given."""

    checkpoint: bytes | None = None


class CheckpointReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a `CheckpointRequest`: the checkpoint, that the claim has ended, or an error.

    `is_unfit`: the error is that the checkpoint cannot be stored, or read. `is_not_sealed`: it waits
    to be sealed.
    """

    checkpoint: bytes | None = None
    is_stale: bool = False
    error: str | None = None
    is_unfit: bool = False
    is_not_sealed: bool = False


class Skipped(msgspec.Struct, frozen=True):
    """A step failed that the task does not need."""

    step: str
    error: str


class OutputReport(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of the output of a run. A thread that an earlier task has left may send one as well."""

    task_id: str
    token: int
    data: bytes


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from a child: a run has started, reports something, or has ended."""

    has_started: bool = False
    progress: Progress | None = None
    output: OutputReport | None = None
    skipped: Skipped | None = None
    checkpoint_request: CheckpointRequest | None = None
    enqueue_request: EnqueueRequest | None = None
    question: TaskQuestion | None = None
    flow_request: FlowRequest | None = None
    result: bytes | None = None
    error: TaskError | None = None
    unserialisable: TaskError | None = None
    signal: SignalRecord | None = None
    items: list[Reply] | None = None
    """How each run of a batch has ended."""
    needs_closing: bool = False
    """With the end of a run: the process holds a lifespan or resources, which it has to close."""

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        ends = (self.result, self.error, self.unserialisable, self.signal, self.items)
        return any(end is not None for end in ends)


decode_config = internal_decoder(ChildConfig)
decode_request = internal_decoder(RunRequest)
decode_reply = internal_decoder(Reply)
decode_checkpoint_reply = internal_decoder(CheckpointReply)
