"""`omniq schema restored`, and what `omniq doctor` says about it."""

from __future__ import annotations

import pytest

from omniq.storage.row_rules import first_token


def test_after_a_reported_restore_tokens_continue_above_all_earlier_ones(omniq, queue):
    queue.enqueue("clitasks.add", 1)
    completed = omniq("schema", "restored")
    epoch = int(completed.out.split()[-1])
    (task,) = queue._portal.run(queue.storage.reserve(1))

    assert (completed.code, completed.err) == (0, "")
    assert task.token == first_token(epoch)


def test_doctor_says_that_the_store_was_restored(omniq, queue):
    assert "ok    epoch" in omniq("doctor").out
    epoch = omniq("schema", "restored").out.split()[-1]
    shown = next(line for line in omniq("doctor").out.splitlines() if "epoch" in line)

    assert epoch in shown
    assert "the store went back" in shown


@pytest.mark.parametrize("command", ["install", "check", "sql"])
def test_only_postgres_has_tables(omniq, queue, command):
    completed = omniq("schema", command)

    assert completed.code != 0
    assert "only postgresql:// has a schema" in completed.err


def test_an_upgrade_says_that_no_key_is_set(omniq, queue):
    completed = omniq("schema", "upgrade")

    assert (completed.code, completed.err) == (0, "")
    assert "no key is set" in completed.out


def test_an_upgrade_does_not_create_a_storage(omniq, folder):
    completed = omniq("schema", "upgrade")

    assert completed.code != 0
    assert "there is no storage" in completed.err
    assert not (folder / "tasks.db").exists()
