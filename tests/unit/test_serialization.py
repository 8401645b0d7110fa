"""Records are decoded exactly as they were encoded, and bad bytes are only refused."""

from __future__ import annotations

import math
import pickle
import random
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.errors import SerializationError, SettingsError
from omniq.models import Task, TaskResult, TaskStatus
from omniq.serialization import (
    CloudpickleSerializer,
    MsgspecSerializer,
    encode_internal,
    internal_decoder,
    serializer_for,
)
from omniq.settings import Settings
from omniq.storage.row_rules import Row
from omniq.testing.builders import a_result, a_task, an_error

KEY, OTHER_KEY = b"k" * 16, b"o" * 16

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**300), max_value=2**300)
    | st.floats()
    | st.text()
    | st.binary()
    | st.datetimes()
    | st.datetimes(timezones=st.just(UTC))
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.decimals()
)
keys = st.text() | st.integers(min_value=-(2**63), max_value=2**64 - 1) | st.booleans()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.fixture(params=["msgspec", "cloudpickle"])
def serializer(request):
    return MsgspecSerializer() if request.param == "msgspec" else CloudpickleSerializer(KEY)


@given(values)
@pytest.mark.fault("F68", "F69")
def test_every_encoded_value_is_decoded_equal(value):
    serializer = MsgspecSerializer()
    task = a_task("a", args=(value,), kwargs={"k": value})
    decoded = serializer.decode_task(serializer.encode_task(task))
    result = serializer.decode_result(serializer.encode_result(a_result(task, value)))

    # The repr distinguishes -0.0 from 0.0 and a tuple from a list, and is equal for two NaNs.
    assert repr(decoded.args) == repr((value,))
    assert repr(decoded.kwargs) == repr({"k": value})
    assert repr(result.result) == repr(value)


def test_a_task_and_a_result_are_decoded_completely(serializer):
    task = a_task("a", args=(1, (2,)), kwargs={"k": {3}}, priority=5, metadata={"m": [None]})
    result = TaskResult(
        task_id="a",
        status=TaskStatus.FAILED,
        error=an_error(timestamp=datetime(2026, 1, 1, tzinfo=UTC), retry_after=2.5),
        attempts=3,
        warnings=("w",),
    )

    assert serializer.decode_task(serializer.encode_task(task)) == task
    assert serializer.decode_result(serializer.encode_result(result)) == result


def test_fuzzed_bytes_raise_nothing_but_serialization_errors(serializer):
    draw = random.Random(20_26)
    task = a_task("a", args=(1, "x", (2.5, None), {3}, Decimal("1"), UUID(int=1), timedelta(1)))
    whole = serializer.encode_task(task), serializer.encode_result(a_result(task, task.args))
    for number in range(2_000):
        data = bytearray(whole[number % 2] if draw.random() < 0.7 else draw.randbytes(60))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = bytes(data[: draw.randint(0, len(data))] if draw.random() < 0.3 else data)
        for decode in (serializer.decode_task, serializer.decode_result):
            try:
                decode(cut)
            except SerializationError as error:
                assert str(error)  # noqa: PT017 - some mutations are harmless, so it may not raise


@pytest.mark.fault("F66")
def test_nesting_is_limited_when_decoding_too():
    generous, strict = MsgspecSerializer(max_depth=64), MsgspecSerializer(max_depth=8)
    deep: object = "x"
    for _ in range(20):
        deep = (deep,)
    lists: object = "x"
    for _ in range(20):
        lists = [lists]

    for value in (deep, lists):
        data = generous.encode_result(a_result(a_task("a"), value))
        with pytest.raises(SerializationError, match="nested more than 8 levels deep"):
            strict.decode_result(data)


@pytest.mark.fault("F65")
def test_the_size_of_a_payload_is_limited_both_ways():
    small, large = MsgspecSerializer(max_payload=200), MsgspecSerializer()
    task = a_task("a", args=("x" * 300,))

    with pytest.raises(SerializationError, match=r"task a takes .* more than max_payload 200"):
        small.encode_task(task)
    with pytest.raises(SerializationError, match="more than max_payload 200"):
        small.decode_task(large.encode_task(task))


def test_the_default_serializer_never_unpickles():
    record = pickle.dumps(a_task("a").args)

    with pytest.raises(SerializationError, match="not a valid record"):
        MsgspecSerializer().decode_task(record)


@pytest.mark.fault("F70")
def test_the_path_of_a_refused_value_is_an_attribute():
    with pytest.raises(SerializationError) as refused:
        MsgspecSerializer().encode_task(a_task("a", args=(0, {"k": [object()]})))

    assert refused.value.path == "args[1]['k'][0]"


def test_cloudpickle_encodes_what_msgspec_refuses():
    serializer = CloudpickleSerializer(KEY)
    task = serializer.decode_task(serializer.encode_task(a_task("a", args=(lambda n: n + 1,))))
    result = serializer.decode_result(serializer.encode_result(a_result(task, math.sin)))

    assert task.args[0](41) == 42
    assert result.result is math.sin


def test_a_record_signed_with_another_key_is_not_unpickled():
    data = CloudpickleSerializer(OTHER_KEY).encode_task(a_task("a", args=(_Bomb(),)))

    with pytest.raises(SerializationError, match="the signature is wrong"):
        CloudpickleSerializer(KEY).decode_task(data)


def test_a_changed_record_is_not_unpickled():
    serializer = CloudpickleSerializer(KEY)
    data = serializer.encode_task(a_task("a"))

    for place in (0, 31, 32, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(SerializationError, match="the signature is wrong"):
            serializer.decode_task(bytes(changed))


def test_a_task_cannot_be_passed_off_as_a_result():
    serializer = CloudpickleSerializer(KEY)

    with pytest.raises(SerializationError, match="the signature is wrong"):
        serializer.decode_result(serializer.encode_task(a_task("a")))


def test_a_key_can_be_replaced_while_workers_run():
    old, new = CloudpickleSerializer(OTHER_KEY), CloudpickleSerializer(KEY, old_keys=[OTHER_KEY])
    task = a_task("a", args=({1},))

    assert new.decode_task(old.encode_task(task)) == task
    assert CloudpickleSerializer(KEY).decode_task(new.encode_task(task)) == task
    with pytest.raises(SerializationError):
        old.decode_task(new.encode_task(task))


def test_cloudpickle_needs_a_key_of_a_minimum_length():
    for key in ("", b"short", "fifteen letters"):
        with pytest.raises(SettingsError, match="a signing key of at least 16 bytes"):
            CloudpickleSerializer(key)
        with pytest.raises(SettingsError, match="a signing key of at least 16 bytes"):
            CloudpickleSerializer(KEY, old_keys=[key])
    CloudpickleSerializer("sixteen letters!")


def test_a_value_whose_pickling_raises_is_refused():
    with pytest.raises(SerializationError, match=r"^args: cannot be pickled"):
        CloudpickleSerializer(KEY).encode_task(a_task("a", args=(threading.Lock(),)))


def test_a_pickle_that_cannot_be_loaded_is_refused():
    serializer = CloudpickleSerializer(KEY)
    data = serializer.encode_task(a_task("a", args=(_Bomb(),)))

    with pytest.raises(SerializationError, match="cannot be unpickled: it went off"):
        serializer.decode_task(data)


def test_the_settings_choose_the_serializer():
    assert isinstance(serializer_for(Settings()), MsgspecSerializer)
    chosen = serializer_for(Settings(serializer="cloudpickle", signing_key="k" * 16))
    assert isinstance(chosen, CloudpickleSerializer)
    with pytest.raises(SerializationError, match="more than max_payload 100"):
        serializer_for(Settings(max_payload=100)).encode_task(a_task(args=("x" * 200,)))


def test_internal_records_are_decoded_equal_and_bad_data_is_refused():
    row = Row(
        id="a", queue="q", priority=1, func_path="m.f", body=b"\0", due=1, visible=0, created_at=1
    )
    decode = internal_decoder(Row)

    assert decode(encode_internal(row)) == row
    for garbage in (b"", b"\xc1", encode_internal({"id": 1}), encode_internal([1]), b"\xff" * 100):
        with pytest.raises(SerializationError, match="not a valid Row record"):
            decode(garbage)


@pytest.mark.fault("F93")
def test_unknown_fields_of_a_newer_version_are_ignored():
    data = msgspec.msgpack.encode({"id": "a", "func_path": "m.f", "colour": "blue"})

    assert MsgspecSerializer().decode_task(data).func_path == "m.f"


class _Bomb:
    def __reduce__(self):
        return _go_off, ()


def _go_off() -> Task:
    raise RuntimeError("it went off")
