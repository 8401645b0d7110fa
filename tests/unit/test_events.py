"""Events reach every listener, and no listener can break the emitter."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from loguru import logger

from omniq import events, log
from omniq.events import Dispatcher, Event, TaskStarted, facts

AN_EVENT = TaskStarted(id="t1", func_path="mail.send", queue="default", attempt=1)


def leaves(cls: type[Event] = Event) -> list[type[Event]]:
    children = cls.__subclasses__()
    return [leaf for child in children for leaf in leaves(child)] if children else [cls]


@pytest.fixture
def lines():
    written: list[str] = []
    sink = logger.add(lambda message: written.append(message.record["message"]), level=0)
    log.enable()
    yield written
    log.disable()
    logger.remove(sink)


def test_a_new_dispatcher_has_no_listeners():
    assert Dispatcher().active is False


def test_every_listener_gets_every_event_in_order_of_subscription():
    received: list[tuple[str, Event]] = []
    dispatcher = Dispatcher()
    dispatcher.subscribe(lambda event: received.append(("first", event)))
    dispatcher.subscribe(lambda event: received.append(("second", event)))
    dispatcher.emit(AN_EVENT)

    assert dispatcher.active is True
    assert received == [("first", AN_EVENT), ("second", AN_EVENT)]


def test_an_unsubscribed_listener_gets_no_more_events():
    received: list[Event] = []
    dispatcher = Dispatcher()
    unsubscribe = dispatcher.subscribe(received.append)
    unsubscribe()
    unsubscribe()
    dispatcher.emit(AN_EVENT)

    assert received == []
    assert dispatcher.active is False


def test_the_same_listener_may_subscribe_twice_and_unsubscribe_once():
    received: list[Event] = []
    dispatcher = Dispatcher()
    unsubscribe = dispatcher.subscribe(received.append)
    dispatcher.subscribe(received.append)
    unsubscribe()
    dispatcher.emit(AN_EVENT)

    assert received == [AN_EVENT]


def test_a_listener_may_unsubscribe_while_it_is_called():
    received: list[Event] = []
    dispatcher = Dispatcher()

    def once(event: Event) -> None:
        received.append(event)
        unsubscribe()

    unsubscribe = dispatcher.subscribe(once)
    dispatcher.emit(AN_EVENT)
    dispatcher.emit(AN_EVENT)

    assert received == [AN_EVENT]


def test_a_listener_that_raises_does_not_affect_others_and_is_reported_once(lines):
    received: list[Event] = []
    dispatcher = Dispatcher()

    def broken(event: Event) -> None:
        raise LookupError("{not a template}")

    dispatcher.subscribe(broken)
    dispatcher.subscribe(received.append)
    dispatcher.emit(AN_EVENT)
    dispatcher.emit(AN_EVENT)

    assert received == [AN_EVENT, AN_EVENT]
    assert len(lines) == 1
    assert "events.subscriber_failed" in lines[0]
    assert "LookupError" in lines[0]


def test_every_event_has_a_unique_dotted_name():
    names = [leaf.name for leaf in leaves()]

    assert len(names) == len(set(names)) > 15
    assert all(name.count(".") == 1 for name in names)


def test_no_event_has_a_field_for_arguments_or_results():
    named = {field for leaf in leaves() for field in leaf.__struct_fields__}

    assert named.isdisjoint({"args", "kwargs", "result", "value", "payload", "metadata"})


def test_events_are_frozen():
    with pytest.raises(AttributeError):
        AN_EVENT.id = "other"  # type: ignore[misc]  # that it cannot be set is the point


def test_an_event_can_be_encoded_and_decoded():
    event = events.TaskRetried(
        id="t1",
        func_path="m.f",
        queue="q",
        error="SMTPTimeout",
        retry_at=datetime(2030, 1, 1, tzinfo=UTC),
    )

    assert msgspec.json.decode(msgspec.json.encode(event), type=events.TaskRetried) == event


def test_facts_omit_empty_fields():
    event = events.TaskCancellation(id="t1", func_path="m.f", queue="q", attempt=0)

    assert facts(event) == {"id": "t1", "func_path": "m.f", "queue": "q", "attempt": 0}
