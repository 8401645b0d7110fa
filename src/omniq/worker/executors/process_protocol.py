"""What crosses between a worker and its child processes: codec bytes, never pickles of our own."""

from __future__ import annotations

import struct

import msgspec

from omniq.errors import OmniqError
from omniq.models import Progress, TaskError
from omniq.serialization import (
    CloudpickleSerializer,
    MsgspecSerializer,
    Serializer,
    internal_decoder,
)
from omniq.tasks.control import Discard, Retry, Signal, Snooze
from omniq.tasks.error_rules import ErrorRules, path_of_rule, rule_at

HEADER = struct.Struct(">I")
"""Comes before each message: its length."""

SLACK = 1024 * 1024
"""How much larger than a result a message may be: a traceback is bounded, but not small."""

_MAX_REASON = 1000


class Unserialisable(OmniqError):
    """The function returned, and what it returned cannot be carried."""

    def __init__(self, error: TaskError) -> None:
        super().__init__(error.message)
        self.error = error


class RuleBook(msgspec.Struct, frozen=True):
    """A worker's rules for errors, by the paths of what they name."""

    transient: list[str]
    permanent: list[str]
    http: bool
    only_transient: bool | None

    @classmethod
    def of(cls, rules: ErrorRules) -> RuleBook:
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


class Welcome(msgspec.Struct, frozen=True):
    """The first message to a child: how to find and decode what it will be sent.

    `pickle_key` signs pickles on this one socket; it is not the key of the store.
    """

    path: list[str]
    allow: list[str] | None
    max_payload: int
    pickle_key: str | None
    rules: RuleBook | None = None

    def codec(self) -> Serializer:
        """What carries tasks and results across. A little roomier than the store's own limit:
        a task as it is claimed is larger than it was when it was enqueued."""
        limit = self.max_payload + SLACK // 2
        if self.pickle_key is None:
            return MsgspecSerializer(max_payload=limit)
        return CloudpickleSerializer(self.pickle_key, max_payload=limit)


class Order(msgspec.Struct, frozen=True):
    """One call for a child to make."""

    task: bytes
    timeout: float | None


class SignalRecord(msgspec.Struct, frozen=True):
    """A `Retry`, `Snooze` or `Discard` that the task raised, or a subclass of one."""

    kind: str
    delay: float | None
    reason: str

    @classmethod
    def of(cls, raised: Signal) -> SignalRecord:
        reason = TaskError.from_exception(raised).message[:_MAX_REASON]
        match raised:
            case Snooze():
                return cls("snooze", float(raised.delay), reason)
            case Discard():
                return cls("discard", None, reason)
            case _:
                delay = getattr(raised, "delay", None)
                return cls("retry", None if delay is None else float(delay), reason)

    def to_signal(self) -> Signal:
        match self.kind:
            case "snooze":
                return Snooze(self.delay or 0)
            case "discard":
                return Discard(self.reason)
            case _:
                return Retry(self.reason, delay=self.delay)


class Ask(msgspec.Struct, frozen=True):
    """A child wants the task's checkpoint; or to have this one kept, if it is given."""

    checkpoint: bytes | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of it: the checkpoint there is, that the claim has ended, or an error.

    `is_unfit`: the error is that the checkpoint is not one that can be kept, or read.
    """

    checkpoint: bytes | None = None
    is_stale: bool = False
    error: str | None = None
    is_unfit: bool = False


class Skipped(msgspec.Struct, frozen=True):
    """A step failed that the task can do without."""

    step: str
    error: str


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from a child: that it begins, a word on the way, or the end of a call."""

    has_begun: bool = False
    progress: Progress | None = None
    skipped: Skipped | None = None
    ask: Ask | None = None
    result: bytes | None = None
    error: TaskError | None = None
    unserialisable: TaskError | None = None
    signal: SignalRecord | None = None

    @property
    def is_final(self) -> bool:
        """Whether the call has ended."""
        ends = (self.result, self.error, self.unserialisable, self.signal)
        return any(end is not None for end in ends)


decode_welcome = internal_decoder(Welcome)
decode_order = internal_decoder(Order)
decode_reply = internal_decoder(Reply)
decode_answer = internal_decoder(Answer)
