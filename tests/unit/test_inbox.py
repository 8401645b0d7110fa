"""No message and no signal is missed, whenever it arrives."""

from __future__ import annotations

import signal
import threading

from omniq.worker.process.inbox import Inbox


def test_messages_arrive_in_order():
    inbox: Inbox[int] = Inbox()
    for number in range(3):
        inbox.put(number)

    assert [inbox.get(0) for _ in range(4)] == [0, 1, 2, None]


def test_a_message_ends_the_wait():
    inbox: Inbox[str] = Inbox()
    threading.Timer(0.01, inbox.put, ("hello",)).start()

    assert inbox.get(5) == "hello"


def test_no_message_is_lost_when_the_pipe_is_full():
    inbox: Inbox[int] = Inbox()
    for number in range(100_000):
        inbox.put(number)

    assert sum(1 for _ in iter(lambda: inbox.get(0), None)) == 100_000


def test_a_signal_before_the_wait_ends_the_wait():
    inbox: Inbox[int] = Inbox()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with inbox.woken_by_signals():
            signal.raise_signal(signal.SIGUSR1)
            assert inbox.get(None) is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_send_a_message():
    inbox: Inbox[int] = Inbox()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: inbox.put(number))
    try:
        with inbox.woken_by_signals():
            signal.raise_signal(signal.SIGUSR1)
            assert inbox.get(5) == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)
