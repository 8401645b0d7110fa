"""The options of `@task` are checked when the function is defined, not when it runs."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from omniq.errors import InvalidTask
from omniq.models import NO_TIMEOUT, BreakerRule
from omniq.retry import LinearBackoff
from omniq.tasks.options import TaskOptions, check_options


def test_without_options_nothing_is_stored():
    assert check_options() == TaskOptions()
    assert TaskOptions().given() == {}


def test_only_given_options_are_set():
    options = check_options(queue="mail", priority=0, result_ttl=0, unique=None)

    assert options.given() == {"queue": "mail", "priority": 0, "result_ttl": 0.0}


def test_a_timeout_of_none_is_given_and_means_no_limit():
    assert check_options(timeout=None).given() == {"timeout": NO_TIMEOUT}
    assert check_options().timeout is None


def test_a_list_of_delays_gives_the_number_of_retries():
    options = check_options(retry=[10, timedelta(minutes=1), 0])

    assert (options.retry, options.max_retries) == ((10.0, 60.0, 0.0), 3)
    assert check_options(retry=(1, 2), max_retries=2).max_retries == 2
    assert check_options(retry=LinearBackoff(5)).max_retries is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retry": [1, 2], "max_retries": 3}, "give the list alone"),
        ({"retry": []}, "max_retries=0"),
        ({"retry": [1, -1]}, "must be a finite number"),
        ({"retry": [1, None]}, "None in the list"),
        ({"retry": ["10s"]}, "expected a number of seconds"),
        ({"retry": "10, 30"}, r"such as \[10, 30, 60\]"),
        ({"retry": 5}, r"such as \[10, 30, 60\]"),
        ({"retry": [1] * 1001}, "the maximum is 1000"),
        ({"reschedule_on_failure": "yes"}, "expected True or False"),
        ({"task_type": ""}, "1 to 512 characters"),
    ],
)
def test_wrong_values_say_what_is_expected(options, message):
    with pytest.raises(InvalidTask, match=message):
        check_options(**options)


def test_durations_become_seconds():
    options = check_options(
        timeout=timedelta(minutes=1), interval=5, expires=2.5, result_ttl=timedelta(0)
    )

    assert (options.timeout, options.interval) == (60.0, 5.0)
    assert (options.expires, options.result_ttl) == (2.5, 0.0)


@pytest.mark.parametrize(
    ("rate", "stored"),
    [
        ("10/s", (10, 1.0)),
        ("100/m", (100, 60.0)),
        ("5 / 2h", (5, 7200.0)),
        ("1/d", (1, 86400.0)),
        ((3, 0.5), (3, 0.5)),
        ((3, timedelta(seconds=4)), (3, 4.0)),
    ],
)
def test_a_rate_is_a_number_of_tasks_in_a_number_of_seconds(rate, stored):
    assert check_options(rate=rate).rate == stored


def test_a_breaker_may_be_a_name_or_a_rule_or_several():
    smtp = BreakerRule(name="smtp")
    strict = BreakerRule(name="db", max_failures=1)

    assert check_options(breaker="smtp").breaker == (smtp,)
    assert check_options(breaker=["smtp", strict]).breaker == (smtp, strict)


def test_metadata_is_copied_and_cannot_be_changed():
    mine = {"team": "mail"}
    options = check_options(metadata=mine)
    mine["team"] = "other"

    assert options.metadata == {"team": "mail"}
    with pytest.raises(TypeError):
        options.metadata["team"] = "other"  # type: ignore[index]  # that it cannot be set is the point


def test_not_unique_is_the_same_as_not_given():
    assert check_options(unique=False) == TaskOptions()


def test_all_options_can_be_given_together():
    options = check_options(
        queue="mail",
        priority=-5,
        max_retries=0,
        retry=LinearBackoff(step=1),
        timeout=1,
        executor="process",
        breaker="smtp",
        rate="1/s",
        max_running=2,
        limit_key=lambda tenant: str(tenant),
        sequence=lambda tenant: str(tenant),
        sequence_on_failure="halt",
        cron="0 3 * * *",
        tz="Europe/Berlin",
        expires=60,
        result_ttl=60,
        unique=True,
        metadata={"a": 1},
    )

    assert len(options.given()) == 18


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "with space"},
        {"queue": ""},
        {"priority": 1.5},
        {"priority": True},
        {"priority": False},
        {"max_retries": -1},
        {"max_retries": "3"},
        {"max_running": 0},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": math.nan},
        {"timeout": math.inf},
        {"timeout": "30"},
        {"interval": timedelta(0)},
        {"expires": -1},
        {"result_ttl": -1},
        {"retry": 3},
        {"executor": "gpu"},
        {"breaker": ""},
        {"breaker": 3},
        {"breaker": [None]},
        {"rate": "fast"},
        {"rate": "0/s"},
        {"rate": (0, 1)},
        {"rate": (1, 0)},
        {"rate": 10},
        {"limit_key": "tenant"},
        {"limit_key": 5, "rate": "1/s"},
        {"sequence": 5},
        {"sequence": ""},
        {"sequence": "k", "sequence_on_failure": "stop"},
        {"sequence_on_failure": "halt"},
        {"fair_key": 5},
        {"fair_key": ""},
        {"fair_weight": 2},
        {"fair_key": "k", "fair_weight": 0},
        {"fair_key": "k", "fair_weight": math.nan},
        {"fair_key": "k", "fair_weight": math.inf},
        {"fair_key": "k", "fair_weight": 10**400},
        {"fair_key": "k", "fair_weight": True},
        {"fair_key": "k", "ageing": 60},
        {"cost": -math.inf},
        {"ageing": 0},
        {"ageing": math.nan},
        {"unique": 5},
        {"unique": ""},
        {"cron": " "},
        {"cron": "* * * * *", "interval": 5},
        {"tz": "Europe/Berlin"},
        {"metadata": [1]},
        {"metadata": {1: 2}},
        {"colour": "blue"},
    ],
)
@pytest.mark.fault("F89")
def test_invalid_options_are_refused(options):
    with pytest.raises(InvalidTask):
        check_options(**options)
