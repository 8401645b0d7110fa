"""`explain` names every reason why a task does not run, and how it ended."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq.errors import TaskNotFound
from omniq.models import BreakerRule, FairShare, Limit, Progress, Runnable
from omniq.operations.explain import Reason, explain
from omniq.outcomes import Cancelled, Failed, Released, Retried, Succeeded
from omniq.storage import open_storage
from omniq.testing.builders import a_member, a_result, a_task, an_error


async def reasons(storage, task_id: str) -> list[Reason]:
    return list((await explain(storage, task_id)).reasons)


async def codes(storage, task_id: str) -> list[str]:
    return [reason.code for reason in await reasons(storage, task_id)]


async def test_an_unknown_task_is_not_found(storage):
    with pytest.raises(TaskNotFound):
        await explain(storage, "missing")


async def test_a_due_task_with_a_free_worker_is_not_blocked(storage, worker):
    await worker(concurrency=2)
    await storage.enqueue(a_task("a"))

    assert await codes(storage, "a") == ["due"]


async def test_a_delayed_task_says_until_when(storage, worker, clock):
    await worker()
    eta = clock.now() + timedelta(hours=1)
    await storage.enqueue(a_task("a", eta=eta))

    (reason,) = await reasons(storage, "a")
    assert (reason.code, reason.until) == ("not_due", eta)


async def test_a_retried_task_says_how_often_it_failed(storage, worker, clock):
    other = await worker()
    await storage.enqueue(a_task("a"))
    (task,) = await other.reserve(1)
    await other.record([Retried("a", task.token, an_error(), clock.now() + timedelta(minutes=1))])

    (reason,) = await reasons(storage, "a")
    assert reason.code == "not_due"
    assert "failed once" in reason.text


async def test_a_paused_queue_says_how_to_resume_it(storage, worker):
    await worker()
    await storage.enqueue(a_task("a", queue="mail"))
    await storage.pause_queue("mail")

    (reason,) = await reasons(storage, "a")
    assert reason.code == "queue_paused"
    assert reason.hint == "omniq queues resume mail"


async def test_an_open_breaker_says_since_when_until_when_and_why(storage, worker, clock):
    other = await worker()
    rule = BreakerRule(name="smtp", max_failures=1, reset_timeout=60)
    await storage.enqueue_many([a_task("a", breakers=(rule,)), a_task("b", breakers=(rule,))])
    (task,) = await other.reserve(1)
    opened = clock.now()
    error = an_error(error_type="ConnectionRefusedError")
    await other.record([Failed("a", task.token, error)])

    (reason,) = await reasons(storage, "b")
    assert (reason.code, reason.since) == ("breaker_open", opened)
    assert reason.until == opened + timedelta(seconds=60)
    assert "smtp" in reason.text
    assert "ConnectionRefusedError" in reason.text


async def test_a_breaker_that_is_probed_names_the_probe(storage, worker, clock):
    other = await worker(lease=1000)
    rule = BreakerRule(name="smtp", max_failures=1, reset_timeout=60)
    await storage.enqueue_many([a_task(each, breakers=(rule,)) for each in "abc"])
    (task,) = await other.reserve(1)
    await other.record([Failed("a", task.token, an_error())])
    clock.advance(61)
    (probe,) = await other.reserve(1)

    (reason, *_) = await reasons(storage, "c")
    assert reason.code == "breaker_open"
    assert f"task {probe.id} probes it" in reason.text


async def test_a_running_limit_names_the_running_tasks(storage, worker):
    other = await worker(concurrency=5)
    limit = Limit(key="api", max_running=1)
    await storage.enqueue_many([a_task("a", limits=(limit,)), a_task("b", limits=(limit,))])
    await other.reserve(1)

    (reason,) = await reasons(storage, "b")
    assert (reason.code, reason.facts["holders"]) == ("limit", ["a"])


async def test_a_rate_says_when_it_has_room_again(storage, worker, clock):
    other = await worker(concurrency=5)
    limit = Limit(key="api", rate=1, per=10)
    await storage.enqueue_many([a_task("a", limits=(limit,)), a_task("b", limits=(limit,))])
    started = clock.now()
    await other.reserve(1)

    (reason,) = await reasons(storage, "b")
    assert (reason.code, reason.until) == ("rate", started + timedelta(seconds=10))


async def test_without_a_worker_it_says_how_to_start_one(storage, tmp_path):
    async with open_storage(f"sqlite:///{tmp_path}/tasks.db") as shared:
        hints = []
        for each in (shared, storage):
            await each.enqueue(a_task("a", func_path="shop.mail.send"))
            (reason,) = await reasons(each, "a")
            assert reason.code == "no_worker"
            hints.append(reason.hint)

    # No command can see the memory of this process.
    assert hints == [
        "start one, with the module of the function: omniq worker MODULE",
        "start one in this process, with queue.worker()",
    ]


async def test_workers_of_other_queues_do_not_count(storage, worker):
    await worker(queues=("web", "mail"))
    await storage.enqueue(a_task("a", queue="slow"))

    (reason,) = await reasons(storage, "a")
    assert (reason.code, reason.facts["queues"]) == ("no_worker_for_queue", ["mail", "web"])


async def test_full_workers_and_the_tasks_ahead_are_counted(storage, worker, clock):
    other = await worker(concurrency=1)
    await storage.enqueue(a_task("running"))
    await other.reserve(1)
    for task in (
        a_task("first", priority=5),
        a_task("second"),
        a_task("later", eta=clock.now() + timedelta(hours=1)),
        a_task("mine", priority=-1),
        a_task("behind", priority=-2),
    ):
        await storage.enqueue(task)

    busy, behind = await reasons(storage, "mine")
    assert (busy.code, behind.code) == ("all_busy", "behind")
    assert behind.facts == {"ahead": 2, "exact": True}


async def test_the_turns_before_a_task_with_a_fair_key_are_counted(storage, worker, clock):
    other = await worker(concurrency=1)
    await storage.enqueue(a_task("running", priority=9))
    await other.reserve(1)
    for task_id, key in [
        ("a", "acme"),
        ("b", "acme"),
        ("c", "best"),
        ("mine", "acme"),
        ("d", "acme"),
    ]:
        await storage.enqueue(a_task(task_id, fair=FairShare(key=key)))
        clock.advance(1)

    busy, turns = await reasons(storage, "mine")
    assert (busy.code, turns.code) == ("all_busy", "takes_turns")
    assert turns.facts == {"fair_key": "acme", "before": 2, "keys": 1, "exact": True}


async def test_a_task_that_ages_waits_behind_those_whose_turn_is_earlier(storage, worker, clock):
    other = await worker(concurrency=1)
    await storage.enqueue(a_task("running", priority=9))
    await other.reserve(1)
    await storage.enqueue(a_task("old", ageing=10))
    clock.advance(15)
    await storage.enqueue(a_task("higher", ageing=10, priority=2))
    await storage.enqueue(a_task("mine", ageing=10, priority=1))

    _, behind = await reasons(storage, "mine")
    assert behind.facts == {"ahead": 2, "exact": True}


async def test_a_function_that_no_worker_has_is_named_with_its_releases(storage, worker):
    other = await worker(concurrency=2)
    await storage.enqueue(a_task("a", func_path="shop.send"))
    for _ in range(3):
        (task,) = await other.reserve(1)
        await other.record([Released("a", task.token, unknown_function=True)])

    (reason,) = await reasons(storage, "a")
    assert (reason.code, reason.facts) == ("unknown_function", {"releases": 3})
    assert "shop.send" in reason.text


async def test_the_first_word_of_a_name_is_not_taken_for_a_module(storage, worker):
    names = frozenset({"shop", "mail.send"})
    await worker(queues=("other",), runnable=Runnable(modules=("shop",), names=names))
    await worker(concurrency=1, runnable=Runnable(modules=("web",)))
    await storage.enqueue(a_task("a", func_path="mail.send"))

    (reason,) = await reasons(storage, "a")
    assert reason.code == "no_worker_for_function"
    assert reason.hint.endswith("omniq worker MODULE")


async def test_a_function_that_no_live_worker_has_is_named_with_what_the_workers_run(
    storage, worker
):
    first = await worker(runnable=Runnable(modules=("mail",)))
    second = await worker(
        concurrency=1,
        runnable=Runnable(modules=("shop",), excluded=frozenset({"shop.new"})),
    )
    await worker(queues=("other",), runnable=Runnable(modules=("shop",)))
    await storage.enqueue(a_task("a", func_path="shop.new"))
    await storage.enqueue(a_task("b", func_path="shop.old"))

    (reason,) = await reasons(storage, "a")
    assert reason.code == "no_worker_for_function"
    assert reason.text.startswith("No live worker can run shop.new: worker ")
    assert reason.hint == "start a worker that has it: omniq worker shop"
    assert reason.facts["workers"] == {first.owner: "mail", second.owner: "shop; not shop.new"}
    # Tasks that this worker cannot run are not ahead of those that it can.
    assert await codes(storage, "b") == ["due"]


async def test_a_function_that_was_renamed_or_is_newer_than_the_worker_gets_advice_for_that(
    storage, worker
):
    await worker(runnable=Runnable(modules=("shop",), excluded=frozenset({"shop.old"})))
    await storage.enqueue(a_task("a", func_path="shop.old"))

    (reason,) = await reasons(storage, "a")
    assert reason.code == "no_worker_for_function"
    assert reason.hint == (
        "restart the worker if its shop is older; if the function was renamed, mark the new one "
        "with @task(aliases=['shop.old'])"
    )


async def test_only_workers_that_have_the_function_are_busy(storage, worker):
    busy = await worker(concurrency=1, runnable=Runnable(modules=("shop",)))
    await worker(concurrency=5, runnable=Runnable(modules=("mail",)))
    await storage.enqueue_many([a_task("a", func_path="shop.f"), a_task("b", func_path="shop.f")])
    await busy.reserve(1)

    (reason,) = await reasons(storage, "b")
    assert (reason.code, reason.facts) == ("all_busy", {"workers": 1, "slots": 1})


async def test_a_suspect_waits_for_the_other_suspect(storage, worker, clock):
    doomed = await worker(lease=5)
    await storage.enqueue_many([a_task("a"), a_task("b")])
    await doomed.reserve(2)
    clock.advance(6)
    await storage.give_back_abandoned()
    careful = await worker(concurrency=2)
    (held,) = await careful.reserve(2)

    (other,) = {"a", "b"} - {held.id}
    (reason,) = await reasons(storage, other)
    assert (reason.code, reason.facts["holders"]) == ("suspect", [held.id])


async def test_an_expired_waiting_task_is_explained(storage, worker, clock):
    await worker()
    await storage.enqueue(a_task("a", expires=clock.now() + timedelta(seconds=5)))
    clock.advance(6)

    assert "expired" in await codes(storage, "a")


async def test_all_reasons_are_listed_in_order(storage, clock):
    await storage.enqueue(a_task("a", queue="mail", eta=clock.now() + timedelta(hours=1)))
    await storage.pause_queue("mail")

    assert await codes(storage, "a") == ["not_due", "queue_paused", "no_worker"]


async def test_a_running_task_names_its_worker_and_its_progress(storage, worker, clock):
    other = await worker()
    await storage.enqueue(a_task("a", timeout=60))
    (task,) = await other.reserve(1)
    report = Progress(task_id="a", token=task.token, fraction=0.25, message="halfway up")
    await other.report_progress([report])

    explanation = await explain(storage, "a")
    (reason,) = explanation.reasons
    assert (explanation.state, reason.code) == ("running", "held")
    assert other.owner in reason.text
    assert "25% done: halfway up" in reason.text
    assert reason.until == clock.now() + timedelta(seconds=60)


async def test_a_running_task_that_was_cancelled_says_so(storage, worker):
    other = await worker()
    await storage.enqueue(a_task("a"))
    await other.reserve(1)
    await storage.cancel("a")

    assert await codes(storage, "a") == ["held", "cancel_requested"]


async def test_a_stalled_worker_is_reported(storage, worker):
    other = await worker()
    await storage.enqueue(a_task("a"))
    await other.reserve(1)
    await other.renew(concurrency=1, stalled=True)

    assert await codes(storage, "a") == ["held", "worker_stalled"]


async def test_a_task_of_a_dead_worker_waits_for_recovery(storage, worker, clock):
    other = await worker(lease=5)
    await storage.enqueue(a_task("a"))
    await other.reserve(1)
    clock.advance(6)

    (reason,) = await reasons(storage, "a")
    assert (reason.code, reason.facts) == ("worker_lost", {"worker": other.owner})
    assert "omniq worker" in reason.hint


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [
        (lambda task: Succeeded(task.id, task.token, a_result(task)), "succeeded", "succeeded"),
        (lambda task: Failed(task.id, task.token, an_error("no route")), "dead", "no route"),
        (lambda task: Cancelled(task.id, task.token, "not wanted"), "cancelled", "not wanted"),
    ],
)
async def test_an_ended_task_says_how_it_ended(storage, worker, outcome, code, text):
    other = await worker()
    await storage.enqueue(a_task("a"))
    (task,) = await other.reserve(1)
    await other.record([outcome(task)])

    explanation = await explain(storage, "a")
    (reason,) = explanation.reasons
    assert (explanation.state, reason.code) == ("ended", code)
    assert text in reason.text


async def test_an_expired_task_says_that_it_expired(storage, worker, clock):
    other = await worker()
    await storage.enqueue(a_task("a", expires=clock.now() + timedelta(seconds=5)))
    clock.advance(6)
    await other.reserve(1)

    assert await codes(storage, "a") == ["expired"]


async def test_a_dead_letter_is_explained_after_its_record_has_expired(storage, worker, clock):
    other = await worker(lease=100)
    await storage.enqueue(a_task("a", result_ttl=10))
    (task,) = await other.reserve(1)
    await other.record([Failed("a", task.token, an_error())])
    clock.advance(20)

    assert await codes(storage, "a") == ["dead"]


async def test_a_task_of_a_sequence_names_the_task_before_it(storage, worker):
    other = await worker(concurrency=2)
    await storage.enqueue_many([a_member(each, sequence="acme", halts=True) for each in "ab"])

    (reason,) = await reasons(storage, "b")
    assert (reason.code, reason.facts) == (
        "waits_in_sequence",
        {"sequence": "acme", "follows": "a"},
    )
    assert reason.text == "It is in the sequence 'acme' and runs after a"
    (task,) = await other.reserve(1)
    await other.record([Failed("a", task.token, an_error())])
    (reason,) = await reasons(storage, "b")
    assert reason.code == "sequence_halted"
    assert "omniq dead retry a" in reason.hint


async def test_a_task_says_that_it_waits_for_its_sequence_and_for_others(storage, worker):
    await worker(concurrency=2)
    tasks = [a_member("a", sequence="k"), a_task("x"), a_member("b", sequence="k", after=("x",))]
    await storage.enqueue_many(tasks)

    assert await codes(storage, "b") == ["waits_in_sequence", "waits_for"]
