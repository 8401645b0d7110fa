"""A circuit breaker stops calls to a failing service, then probes it with one call at a time."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest
from loguru import logger

from omniq import BreakerState, CircuitBreaker, CircuitOpen, InvalidValue, log
from omniq.events import BreakerClosed, BreakerHalfOpened, BreakerOpened, Event
from omniq.testing.clock import ManualClock

RESET = 30.0


class Service:
    """A service that is up or down, and counts its calls."""

    def __init__(self) -> None:
        self.is_up = True
        self.calls = 0

    async def ask(self, answer: int = 42) -> int:
        return self.ask_at_once(answer)

    def ask_at_once(self, answer: int = 42) -> int:
        self.calls += 1
        if not self.is_up:
            raise ConnectionError("down")
        return answer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def breaker(clock: ManualClock) -> CircuitBreaker:
    return CircuitBreaker(2, RESET, name="mail", clock=clock)


def state_of(breaker: CircuitBreaker) -> BreakerState:
    return breaker.state


async def fail(breaker: CircuitBreaker, service: Service, times: int = 1) -> None:
    service.is_up = False
    for _ in range(times):
        with pytest.raises(ConnectionError):
            await breaker.call(service.ask)


async def test_a_closed_breaker_lets_calls_through(breaker, service):
    assert await breaker.call(service.ask, 7) == 7
    assert await breaker.call(service.ask_at_once, answer=8) == 8
    assert breaker.state is BreakerState.CLOSED


async def test_circuit_breaker_opens_after_max_failures_and_refuses_calls(breaker, service):
    await fail(breaker, service, 2)
    with pytest.raises(CircuitOpen, match="circuit breaker is open: mail"):
        await breaker.call(service.ask)

    assert service.calls == 2
    assert (breaker.state, breaker.failures, breaker.reason) == (
        BreakerState.OPEN,
        2,
        "ConnectionError",
    )


async def test_a_success_resets_the_failure_count(breaker, service):
    await fail(breaker, service)
    service.is_up = True
    await breaker.call(service.ask)
    await fail(breaker, service)

    assert breaker.state is BreakerState.CLOSED


async def test_circuit_breaker_closes_when_a_call_succeeds_after_the_reset_timeout(
    breaker, service, clock
):
    await fail(breaker, service, 2)
    clock.advance(RESET - 0.001)
    with pytest.raises(CircuitOpen):
        await breaker.call(service.ask)
    clock.advance(0.001)
    service.is_up = True

    assert await breaker.call(service.ask) == 42
    assert (breaker.state, breaker.failures, breaker.reason) == (BreakerState.CLOSED, 0, "")


async def test_a_failed_probe_opens_it_for_another_reset_timeout(breaker, service, clock):
    await fail(breaker, service, 2)
    clock.advance(RESET)
    await fail(breaker, service)
    assert breaker.state is BreakerState.OPEN
    clock.advance(RESET - 0.001)
    with pytest.raises(CircuitOpen):
        await breaker.call(service.ask)

    assert service.calls == 3


async def test_one_call_probes_while_the_others_are_refused(breaker, service, clock):
    await fail(breaker, service, 2)
    clock.advance(RESET)
    held = asyncio.Event()
    trying = asyncio.create_task(breaker.call(held.wait))
    await asyncio.sleep(0)
    assert state_of(breaker) is BreakerState.HALF_OPEN
    for _ in range(5):
        with pytest.raises(CircuitOpen):
            await breaker.call(service.ask)
    held.set()
    await trying

    assert service.calls == 2
    assert breaker.state is BreakerState.CLOSED


async def test_a_cancelled_probe_does_not_count_and_the_next_call_may_probe_at_once(
    breaker, service, clock
):
    await fail(breaker, service, 2)
    clock.advance(RESET)
    trying = asyncio.create_task(breaker.call(asyncio.Event().wait))
    await asyncio.sleep(0)
    assert state_of(breaker) is BreakerState.HALF_OPEN
    trying.cancel()
    await asyncio.wait((trying,))
    assert breaker.state is BreakerState.OPEN
    service.is_up = True

    assert await breaker.call(service.ask) == 42


@pytest.mark.fault("F24")
async def test_setting_the_wall_clock_neither_opens_nor_closes_it(breaker, service, clock):
    await fail(breaker, service, 2)
    clock.jump(timedelta(days=-400))
    clock.advance(RESET)
    service.is_up = True

    assert await breaker.call(service.ask) == 42


@pytest.mark.fault("F91")
def test_threads_share_it_and_exactly_one_of_them_probes(breaker, service, clock):
    asyncio.run(fail(breaker, service, 2))
    clock.advance(RESET)
    together, inside, leave = threading.Barrier(9), threading.Semaphore(0), threading.Event()
    refused = []

    def come() -> None:
        together.wait()
        try:
            with breaker.guard():
                inside.release()
                leave.wait(30)
        except CircuitOpen:
            refused.append(1)
            if len(refused) == 7:
                leave.set()

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    together.wait()
    for thread in threads:
        thread.join()

    assert len(refused) == 7
    assert inside.acquire(blocking=False)
    assert not inside.acquire(blocking=False)
    assert breaker.state is BreakerState.CLOSED


async def test_it_protects_blocks_and_functions_too(
    breaker: CircuitBreaker, service: Service
) -> None:
    @breaker
    def ask_at_once(answer: int) -> int:
        return service.ask_at_once(answer)

    @breaker
    async def ask(answer: int) -> int:
        return await service.ask(answer)

    assert (ask_at_once(1), await ask(2), ask.__name__) == (1, 2, "ask")
    service.is_up = False
    with pytest.raises(ConnectionError):
        ask_at_once(1)
    with pytest.raises(ConnectionError), breaker.guard():
        service.ask_at_once()
    with pytest.raises(CircuitOpen):
        await ask(2)


async def test_every_change_of_state_emits_an_event(breaker, service, clock):
    emitted: list[Event] = []
    breaker.events.subscribe(emitted.append)
    await fail(breaker, service, 2)
    clock.advance(RESET)
    await fail(breaker, service)
    clock.advance(RESET)
    service.is_up = True
    await breaker.call(service.ask)
    await breaker.call(service.ask)

    assert emitted == [
        BreakerOpened(breaker="mail", failures=2, reason="ConnectionError"),
        BreakerHalfOpened(breaker="mail"),
        BreakerOpened(breaker="mail", failures=3, reason="ConnectionError"),
        BreakerHalfOpened(breaker="mail"),
        BreakerClosed(breaker="mail"),
    ]


async def test_opening_is_a_warning_and_closing_is_info(breaker, service, clock):
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level} {message}")
    log.enable()
    try:
        await fail(breaker, service, 2)
        clock.advance(RESET)
        service.is_up = True
        await breaker.call(service.ask)
    finally:
        log.disable()
        logger.remove(sink)

    assert [line.strip() for line in lines] == [
        "WARNING breaker.opened breaker=mail failures=2 reason=ConnectionError",
        "INFO breaker.half_opened breaker=mail",
        "INFO breaker.closed breaker=mail",
    ]


@pytest.mark.parametrize(
    "wrong", [{"max_failures": 0}, {"reset_timeout": -1}, {"reset_timeout": float("nan")}]
)
def test_invalid_breaker_arguments_are_refused(wrong):
    with pytest.raises(InvalidValue):
        CircuitBreaker(**wrong)


def test_a_failing_listener_does_not_affect_calls(service):
    breaker = CircuitBreaker(1, RESET)
    breaker.events.subscribe(lambda _: 1 / 0)
    service.is_up = False

    with pytest.raises(ConnectionError), breaker.guard():
        service.ask_at_once()
    assert breaker.state is BreakerState.OPEN
