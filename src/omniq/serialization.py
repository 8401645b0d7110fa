"""Tasks and results to bytes and back.

`MsgspecSerializer`, the default, encodes data only: reading a record never runs code. A decoded
value equals the original and has the same type, or, for a subclass of a plain type, that plain type;
other values are refused when the task is enqueued, with the path of the bad value.
`CloudpickleSerializer` encodes anything that Python can pickle. It must be chosen explicitly, and
signs every record, because unpickling foreign bytes runs foreign code. With a key in the settings,
the records of `MsgspecSerializer` are signed or encrypted too.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Protocol, TypeVar
from uuid import UUID

import msgspec

from omniq.errors import SerializationError, SettingsError
from omniq.models import ErrorCategory, Task, TaskError, TaskResult
from omniq.settings import Settings
from omniq.signing import Seal, SealedSerializer, unsealed

DEFAULT_MAX_PAYLOAD = 1024 * 1024
DEFAULT_MAX_DEPTH = 64

_T = TypeVar("_T")
_D = TypeVar("_D")


class Serializer(Protocol):
    """Encodes and decodes tasks and results, the two records that storages store."""

    def encode_task(self, task: Task) -> bytes:
        """Encode the task; `SerializationError` when a value cannot be encoded or is too large."""
        ...

    def decode_task(self, data: bytes) -> Task:
        """Decode a task; `SerializationError` when the bytes are not one."""
        ...

    def encode_result(self, result: TaskResult) -> bytes:
        """Encode the result; the same errors as `encode_task`."""
        ...

    def decode_result(self, data: bytes) -> TaskResult:
        """Decode a result; the same errors as `decode_task`."""
        ...


class MsgspecSerializer:
    """MessagePack, data only, bounded in size and depth.

    Preserved exactly: None, bool, int of any size, float, str, bytes, list, tuple, dict, set,
    frozenset, aware and naive datetime, date, time, timedelta, UUID, Decimal. A subclass of one of
    them (an `IntEnum`, an `OrderedDict`, a row of a driver) becomes the plain type, and so does a
    scalar of numpy. Anything else is refused.
    """

    def __init__(
        self, *, max_payload: int = DEFAULT_MAX_PAYLOAD, max_depth: int = DEFAULT_MAX_DEPTH
    ) -> None:
        self._max_payload = max_payload
        self._values = _ValueCodec(max_depth)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_error)
        self._task_decoder = msgspec.msgpack.Decoder(Task, ext_hook=self._values.decode_ext)
        self._result_decoder = msgspec.msgpack.Decoder(
            TaskResult, dec_hook=_decode_error, ext_hook=self._values.decode_ext
        )

    def encode_task(self, task: Task) -> bytes:
        values = self._values
        args = values.encode_items(task.args, "args")
        kwargs = values.encode_dict(task.kwargs, "kwargs") if task.kwargs else task.kwargs
        metadata = values.encode_dict(task.metadata, "metadata") if task.metadata else task.metadata
        if args is not task.args or kwargs is not task.kwargs or metadata is not task.metadata:
            task = msgspec.structs.replace(task, args=tuple(args), kwargs=kwargs, metadata=metadata)
        return self._bounded(self._encode(task), "task", task.id)

    def decode_task(self, data: bytes) -> Task:
        task = self._decode(self._task_decoder.decode, data)
        if self._values.nesting.has_ext:
            self._values.nesting.has_ext = False
            msgspec.structs.force_setattr(task, "args", tuple(map(unwrapped, task.args)))
            unwrapped(task.kwargs)
            unwrapped(task.metadata)
        # Arguments without containers need no further check, and most have none.
        if not _CONTAINERS.isdisjoint(map(type, task.args)):
            self._values.check_depth(task.args, "args")
        if task.kwargs:
            self._values.check_depth(task.kwargs, "kwargs")
        if task.metadata:
            self._values.check_depth(task.metadata, "metadata")
        return task

    def encode_result(self, result: TaskResult) -> bytes:
        value = result.result
        if type(value) not in _PLAIN:
            encoded = self._values.encode(value, "result")
            if encoded is not value:
                result = msgspec.structs.replace(result, result=encoded)
        return self._bounded(self._encode(result), "result of task", result.task_id)

    def decode_result(self, data: bytes) -> TaskResult:
        result = self._decode(self._result_decoder.decode, data)
        if self._values.nesting.has_ext:
            self._values.nesting.has_ext = False
            msgspec.structs.force_setattr(result, "result", unwrapped(result.result))
        self._values.check_depth(result.result, "result")
        return result

    def _encode(self, record: Task | TaskResult) -> bytes:
        try:
            return self._encoder.encode(record)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise SerializationError(f"cannot be encoded: {error}") from error

    def _decode(self, decode: Callable[[bytes], _T], data: bytes) -> _T:
        if len(data) > self._max_payload:
            raise SerializationError(
                f"{len(data)} bytes, more than max_payload {self._max_payload}"
            )
        try:
            return decode(data)
        except (
            *(msgspec.MsgspecError, ValueError, TypeError, RecursionError),
            # Raised by the standard library for some malformed dates.
            *(LookupError, AttributeError),
        ) as error:
            raise SerializationError(f"not a valid record: {error}") from error
        except (OverflowError, ArithmeticError) as error:
            raise SerializationError(f"a number in the record is out of range: {error}") from error

    def _bounded(self, data: bytes, what: str, task_id: str) -> bytes:
        if len(data) > self._max_payload:
            raise SerializationError(
                f"{what} {task_id} takes {len(data)} bytes, more than max_payload {self._max_payload}; "
                "store the data elsewhere and pass a reference, or raise OMNIQ_MAX_PAYLOAD"
            )
        return data


class CloudpickleSerializer(SealedSerializer):
    """Arguments and results as pickles, every record signed or encrypted.

    The keys are those of a `Seal`: they can be replaced while workers run. Anyone who has a key can
    run code in your workers.
    """

    def __init__(
        self,
        signing_key: str | bytes | None,
        *,
        encryption_key: str | bytes | None = None,
        old_keys: Sequence[str | bytes] = (),
        max_payload: int = DEFAULT_MAX_PAYLOAD,
    ) -> None:
        seal = Seal(signing_key, encryption_key=encryption_key, old_keys=old_keys)
        super().__init__(_PickleSerializer(max_payload), seal)


class _PickleSerializer:
    """Pickles inside the records of plain data. Only a seal makes them safe to read."""

    keeps_objects = True

    def __init__(self, max_payload: int) -> None:
        try:
            import cloudpickle  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise SettingsError(
                "the cloudpickle serializer is an extra: pip install 'omniq[cloudpickle]'"
            ) from error
        self._pickle: Any = cloudpickle
        self._max_payload = max_payload
        # The envelope contains the pickle as bytes, so the limits of plain data apply to it.
        self._envelope = MsgspecSerializer(max_payload=max_payload + 4096)

    def encode_task(self, task: Task) -> bytes:
        payload = self._dump((task.args, task.kwargs), "args")
        return self._envelope.encode_task(msgspec.structs.replace(task, args=(payload,), kwargs={}))

    def decode_task(self, data: bytes) -> Task:
        envelope = self._envelope.decode_task(data)
        args, kwargs = self._load(envelope.args[0])
        return msgspec.structs.replace(envelope, args=args, kwargs=kwargs)

    def encode_result(self, result: TaskResult) -> bytes:
        payload = self._dump(result.result, "result")
        return self._envelope.encode_result(msgspec.structs.replace(result, result=payload))

    def decode_result(self, data: bytes) -> TaskResult:
        envelope = self._envelope.decode_result(data)
        return msgspec.structs.replace(envelope, result=self._load(envelope.result))

    def _dump(self, value: object, path: str) -> bytes:
        try:
            data: bytes = self._pickle.dumps(value)
        except Exception as error:
            # Pickling calls methods of the value, which may raise any exception.
            raise SerializationError(f"cannot be pickled: {error}", path=path) from error
        if len(data) > self._max_payload:
            raise SerializationError(
                f"takes {len(data)} bytes, more than max_payload {self._max_payload}", path=path
            )
        return data

    def _load(self, data: object) -> Any:
        if not isinstance(data, bytes):
            raise SerializationError("not a pickled record")
        try:
            return self._pickle.loads(data)
        except Exception as error:
            # Unpickling imports and calls what the record names.
            raise SerializationError(f"cannot be unpickled: {error}") from error


_PLAIN = frozenset({type(None), bool, float, bytes})
_EXT_TUPLE, _EXT_SET, _EXT_FROZENSET, _EXT_INT = 1, 2, 3, 4
_EXT_DATETIME, _EXT_DATE, _EXT_TIME, _EXT_TIMEDELTA, _EXT_UUID, _EXT_DECIMAL = 5, 6, 7, 8, 9, 10
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1
_MAX_BIG_INT_BYTES = 4096


class _ValueCodec:
    """Converts Python values to and from MessagePack without changing their types.

    MessagePack has no tuples, sets, large integers or dates: they are encoded as extension types.
    Other values are passed through unchanged.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self.decode_ext)
        # The decoder's depth limit does not see extension types that are nested through Python.
        self.nesting = _Nesting()

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """The value in a form that MessagePack can encode: itself where possible."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if _SMALLEST <= value <= _LARGEST else _big_int(value, path)
        if kind is str:
            return _checked_text(value, path)
        if depth >= self._max_depth:
            raise SerializationError(f"nested more than {self._max_depth} levels deep", path=path)
        if kind is list:
            return self.encode_items(value, path, depth)
        if kind is dict:
            return self.encode_dict(value, path, depth)
        code = _CONTAINER_CODES.get(kind)
        if code is not None:
            items = list(value) if kind is tuple else distinct(value, path)
            encoded_items = self.encode_items(items, path, depth)
            return msgspec.msgpack.Ext(code, self._encoder.encode(encoded_items))
        encoded = _encode_scalar(value)
        if encoded is not None:
            return encoded
        return self.encode(_plain_value(value, path), path, depth)

    def encode_dict(self, value: dict[Any, Any], path: str, depth: int = 0) -> dict[Any, Any]:
        changed = False
        encoded: dict[Any, Any] = {}
        for key, item in value.items():
            if type(key) not in _KEYS:
                key = _plain_key(key, path)
                changed = True
            where = f"{path}[{key!r:.60}]"
            new_key = self.encode(key, where, depth)
            if type(key) is float and math.isnan(key):
                raise SerializationError("NaN cannot be a dictionary key", path=path)
            if type(new_key) is msgspec.msgpack.Ext:
                raise SerializationError("dictionary keys must fit 64 bits", path=where)
            new_item = self.encode(item, where, depth + 1)
            changed = changed or new_item is not item
            encoded[new_key] = new_item
        return encoded if changed else value

    def encode_items(self, items: Any, path: str, depth: int = 0) -> Any:
        """The same list or tuple if its items need no conversion, else a new list."""
        encoded: list[Any] | None = None
        for index, item in enumerate(items):
            kind = type(item)
            if encoded is None and (
                kind in _PLAIN
                or (kind is int and _SMALLEST <= item <= _LARGEST)
                or (kind is str and item.isascii())
            ):
                # Needs no conversion: skip the cost of building its path.
                continue
            # Each item is encoded once: twice per level would be 2**depth times for the innermost.
            new_item = self.encode(item, f"{path}[{index}]", depth + 1)
            if encoded is None and new_item is not item:
                encoded = list(items[:index])
            if encoded is not None:
                encoded.append(new_item)
        return items if encoded is None else encoded

    def decode_ext(self, code: int, data: memoryview) -> Any:
        """Decode one extension type; `msgspec` calls this."""
        if code not in _EXT_MAKERS:
            raise ValueError(f"unknown extension type {code}")
        depth = self.nesting.depth
        if depth >= self._max_depth:
            raise ValueError(f"nested more than {self._max_depth} levels deep")
        self.nesting.depth = depth + 1
        self.nesting.has_ext = True
        try:
            return _Decoded(_EXT_MAKERS[code](unwrapped(self._decoder.decode(data))))
        finally:
            self.nesting.depth = depth

    def check_depth(self, value: Any, path: str) -> None:
        """Refuse a value that is nested too deeply: user code would recurse into it."""
        level = _nested_in(value) if type(value) in _CONTAINERS else []
        depth = 0
        while level:
            depth += 1
            if depth >= self._max_depth:
                raise SerializationError(
                    f"nested more than {self._max_depth} levels deep", path=path
                )
            level = [inner for container in level for inner in _nested_in(container)]


class _Nesting(threading.local):
    """How deep the value is that a thread decodes, and whether its record has extension types."""

    depth = 0
    has_ext = False


class _Decoded:
    """A value of an extension type, until its record is decoded. No key of a dictionary can be one.

    Only text and small numbers are keys; others can be chosen so that all of them have the same hash.
    """

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value


def unwrapped(value: Any) -> Any:
    """The value with those of extension types in the places where they were decoded."""
    if type(value) is _Decoded:
        return value.value
    left = [value]
    while left:
        container = left.pop()
        if type(container) is list:
            items: Any = enumerate(container)
        elif type(container) is dict:
            items = container.items()
        else:
            continue
        for key, item in items:
            if type(item) is _Decoded:
                container[key] = item.value
            elif type(item) is list or type(item) is dict:
                left.append(item)
    return value


_MAX_EQUAL_HASHES = 100


def distinct(items: Any, path: str = "") -> list[Any]:
    """The items of a set, or the keys of a dictionary, unless many have the same hash.

    A set of such items takes quadratic time.
    """
    if len(items) > _MAX_EQUAL_HASHES:
        ((_, most),) = Counter(map(hash, items)).most_common(1)
        if most > _MAX_EQUAL_HASHES:
            raise SerializationError(
                f"{most} items of a set, or keys, have the same hash; use a list", path=path
            )
    return list(items)


_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_CONTAINER_CODES: dict[type, int] = {tuple: _EXT_TUPLE, set: _EXT_SET, frozenset: _EXT_FROZENSET}


def _nested_in(container: Any) -> list[Any]:
    """The containers among the items of a container; most have none."""
    items = container.values() if type(container) is dict else container
    if _CONTAINERS.isdisjoint(map(type, items)):
        return []
    return [item for item in items if type(item) in _CONTAINERS]


def _make_datetime(parts: list[Any]) -> datetime:
    text, fold = parts
    return datetime.fromisoformat(text).replace(fold=fold)


_EXT_MAKERS: dict[int, Callable[[Any], Any]] = {
    _EXT_TUPLE: tuple,
    _EXT_SET: lambda items: set(distinct(items)),
    _EXT_FROZENSET: lambda items: frozenset(distinct(items)),
    _EXT_INT: lambda data: int.from_bytes(data, signed=True),
    _EXT_DATETIME: _make_datetime,
    _EXT_DATE: date.fromisoformat,
    _EXT_TIME: time.fromisoformat,
    _EXT_TIMEDELTA: lambda parts: timedelta(parts[0], parts[1], parts[2]),
    _EXT_UUID: lambda data: UUID(bytes=data),
    _EXT_DECIMAL: Decimal,
}


def _encode_scalar(value: Any) -> msgspec.msgpack.Ext | None:
    """Encode a value of a plain type that MessagePack does not have; None for other values."""
    kind = type(value)
    if kind is datetime:
        # Preserves the instant and the offset, not a named zone: its rules may differ elsewhere.
        return _ext(_EXT_DATETIME, [value.isoformat(), value.fold])
    if kind is date:
        return _ext(_EXT_DATE, value.isoformat())
    if kind is time and value.tzinfo in (None, UTC):
        return _ext(_EXT_TIME, value.isoformat())
    if kind is timedelta:
        return _ext(_EXT_TIMEDELTA, [value.days, value.seconds, value.microseconds])
    if kind is UUID:
        return _ext(_EXT_UUID, value.bytes)
    if kind is Decimal:
        return _ext(_EXT_DECIMAL, str(value))
    return None


TO_BASE: dict[type, Callable[[Any], Any]] = {
    # Called on the base: a subclass may have other methods of these names.
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda value: bytes(memoryview(value)),
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    datetime: lambda value: datetime.combine(
        date(value.year, value.month, value.day), datetime.timetz(value)
    ),
    date: lambda value: date(value.year, value.month, value.day),
    time: lambda value: time(
        value.hour, value.minute, value.second, value.microsecond, value.tzinfo, fold=value.fold
    ),
    timedelta: lambda value: timedelta(value.days, value.seconds, value.microseconds),
    UUID: lambda value: UUID(bytes=value.bytes),
    Decimal: lambda value: Decimal(Decimal.__str__(value)),
}
"""Makes a value of each plain type from one of a subclass."""


def _plain_value(value: Any, path: str) -> Any:
    """The value of a subclass of a plain type as that type; refuses all others."""
    kind = type(value)
    for base, plain in TO_BASE.items():
        if issubclass(kind, base) and kind is not base:
            return plain(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        item = value.item()
        if type(item) in _PLAIN or type(item) is int:
            return item
    raise SerializationError(
        f"a value of type {_type_name(value)} cannot be encoded; name its class in the annotation of "
        "the function (a dataclass, a model, an enum), or pass plain data such as an id",
        path=path,
    )


_KEYS = frozenset({str, int, bool, bytes, float, type(None)})


def _plain_key(key: Any, path: str) -> Any:
    if isinstance(key, str | int | float | bytes):
        return _plain_value(key, path)
    raise SerializationError(
        f"dictionary key of type {_type_name(key)}; use text or numbers", path=path
    )


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _big_int(value: int, path: str) -> msgspec.msgpack.Ext:
    length = value.bit_length() // 8 + 1
    if length > _MAX_BIG_INT_BYTES:
        raise SerializationError(f"a number of {length} bytes is too large", path=path)
    return _ext(_EXT_INT, value.to_bytes(length, signed=True))


def _checked_text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise SerializationError(
                f"text is not valid Unicode: {error.reason}", path=path
            ) from None
    return value


def _type_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _encode_error(value: object) -> Any:
    if isinstance(value, TaskError):
        record = value.to_record()
        if value.category is ErrorCategory.UNCLASSIFIED:
            # Releases that do not know this category ignore the second field.
            record["category"] = ErrorCategory.PERMANENT
            record["is_unclassified"] = True
        return record
    raise TypeError(f"a value of type {_type_name(value)} cannot be encoded")


def _decode_error(kind: type, value: Any) -> Any:
    if issubclass(kind, TaskError):
        return TaskError(**msgspec.convert(value, _ErrorRecord).facts())
    raise TypeError(f"unexpected type {kind.__qualname__}")


class _ErrorRecord(msgspec.Struct):
    """The fields of a stored `TaskError`."""

    message: str = ""
    error_type: str = "TaskError"
    traceback: str = ""
    timestamp: datetime | None = None
    category: str = "transient"
    retry_after: float | None = None
    failed_step: str | None = None
    recovery_hint: str | None = None
    is_unclassified: bool = False

    def facts(self) -> dict[str, Any]:
        facts = msgspec.structs.asdict(self)
        if facts.pop("is_unclassified"):
            facts["category"] = ErrorCategory.UNCLASSIFIED
        return facts


def encode_internal(value: Any) -> bytes:
    """Encode one of omniq's internal records (never user data) for a backend to store."""
    return _INTERNAL_ENCODER.encode(value)


_BAD_DATA = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError)
"""What a decoder raises for bytes that are not a record of its kind."""


def internal_decoder(kind: type[_T]) -> Callable[[bytes], _T]:
    """A function that decodes what `encode_internal` wrote; raises `SerializationError` on bad data."""
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=_decode_error)

    def decode(data: bytes) -> _T:
        try:
            return decoder.decode(data)
        except _BAD_DATA as error:
            raise SerializationError(f"not a valid {kind.__name__} record: {error}") from error

    return decode


def lenient_decoder(kind: type[_T], otherwise: _D) -> Callable[[bytes], _T | _D]:
    """As `internal_decoder`, for optional data: returns `otherwise` on bad data instead of raising."""
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=_decode_error)

    def decode(data: bytes) -> _T | _D:
        try:
            return decoder.decode(data)
        except _BAD_DATA:
            return otherwise

    return decode


_INTERNAL_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_error)


def keeps_objects(serializer: Serializer) -> bool:
    """Whether a decoded value has its own class, so that nothing has to become plain data before."""
    return getattr(unsealed(serializer), "keeps_objects", False) is True


def serializer_for(settings: Settings) -> Serializer:
    """The serializer that the settings choose."""
    signing, encryption = settings.signing_key, settings.encryption_key
    old_keys = (settings.old_keys or "").split()
    if settings.serializer == "cloudpickle":
        return CloudpickleSerializer(
            signing,
            encryption_key=encryption,
            old_keys=old_keys,
            max_payload=settings.max_payload,
        )
    plain = MsgspecSerializer(max_payload=settings.max_payload)
    if signing is None and encryption is None:
        return plain
    return SealedSerializer(plain, Seal(signing, encryption_key=encryption, old_keys=old_keys))
