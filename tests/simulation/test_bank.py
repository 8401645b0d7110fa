"""Short runs of `python -m chaos.bank`, and what its checks detect."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from chaos.bank import (
    ACCOUNTS,
    BALANCE,
    check_money,
    check_tasks,
    check_tokens,
    create_ledger,
    note_run,
)
from chaos.bank_places import PLACES


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", PLACES)
def test_a_bank_loses_nothing_and_gives_no_token_twice(backend):
    options = ("--kills", "12", "--stops", "1", "--restarts", "1", "--restores", "1")
    command = [sys.executable, "-m", "chaos.bank", "--backend", backend, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise was kept" in done.stdout


def test_money_that_is_missing_or_was_moved_twice_is_detected():
    accounts = [[number, BALANCE] for number in range(ACCOUNTS)]
    outbox = [["a", 1, 0, 1, 10]]
    assert check_money(accounts, outbox) != []
    accounts[0][1] -= 10
    accounts[1][1] += 10

    assert check_money(accounts, outbox) == []
    assert check_money(accounts, [*outbox, *outbox]) != []


def test_a_transfer_that_is_lost_or_sent_twice_is_detected():
    row = ["a", 1, 0, 1, 10]

    assert check_tasks({"a": 1}, [row], {"a"}) == []
    assert "acknowledged, and not there: ['b']" in check_tasks({"a": 1}, [row], {"a", "b"})
    for outbox in ([row, row], [], [["a", 2, *row[2:]]]):
        (wrong,) = check_tasks({"a": 1}, outbox, {"a"})
        assert wrong.startswith("not once in the outbox")


def test_a_token_that_is_given_twice_and_a_late_write_are_detected(tmp_path):
    ledger = tmp_path / "ledger.db"
    create_ledger(ledger)
    for token in (1, 2):
        note_run(str(ledger), "a", token)
    assert check_tokens({"a": 2}, ledger) == []
    assert check_tokens({"a": 1}, ledger) != []
    note_run(str(ledger), "a", 1)

    assert check_tokens({"a": 2}, ledger) == ["tokens given twice: [('a', 1)]"]
    with closing(sqlite3.connect(ledger)) as db:
        assert db.execute("SELECT token FROM register").fetchall() == [(2,)]
