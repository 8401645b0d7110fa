"""The page docs/reference/peers-under-fire.md, made from what is recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from chaos.peers.fleet import CONCURRENCY, PATIENCE, WORKERS
from chaos.peers.record import Results, Row
from chaos.peers.roster import PEERS, Profile

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "peers-under-fire.md"

_HEAD = f"""# Queues under fire

What happens to tasks when workers die: the same kills for other task queues as for omniq, counted the same way. This page is
made by `make chaos-peers` from `chaos/peers/results.json`, and a test keeps it from saying anything else.

A producer enqueues twenty tasks a second, each of 20 to 400 ms, and writes down outside the store which of them the queue has
acknowledged. {WORKERS} workers with {CONCURRENCY} tasks at a time run them; each run writes down its start and its end, outside
the store as well. One to two seconds after all workers are at work, all processes of one of them get SIGKILL at once, as when a
machine or a container goes, and another worker is started in its place; and so on. After the last kill two tasks a
second go on for as long as the queue's documentation says that a dead worker's tasks need to come back (at most {PATIENCE:.0f} s; what takes longer
is not waited for). Then the store is asked what it still has.

An acknowledged task has finished, or is in one of these columns:

- **lost**: nothing is left of it;
- **failed**: the queue has given up on it, or never will go on with it by itself, and has kept it for a person to look at;
- **later**: the store has it, and the queue will run it again by itself, but not within the time that was waited.

**Ran twice** are tasks with two or more whole runs. All queues that promise *at least once*, omniq among them, may run a task
twice: a worker can die after the task and before that is recorded. **Back after** is the time from the kill to the next start of
a task that was running, median and longest.
"""

_FAIR = """
## How to read it

- Losing is no defect where a queue promises *at most once*: a task that must never run twice has to be lost when nobody
  knows how far it got. Each queue says which it is.
- *As it comes* is the queue as its documentation introduces it, with nothing set but the number of tasks at a time. *Set for safety* is the safest that its
  documentation describes, and the time after which a dead worker's tasks come back set to about five seconds wherever
  it can be set. Five seconds are for the comparison; some queues then need every task to be shorter than that (see the remarks).
- One round is some dozens of interrupted runs. A nought says that it did not happen in these, not that it cannot happen; small
  differences between queues say nothing.
- Only workers were killed. Servers stayed up, with everything synced to disk. Celery and Dramatiq are played on Redis and not on RabbitMQ.
- Twenty deaths in a minute are many. Queues that look for dead workers rarely do better when deaths are rare.
- These rounds are the second kind that was played. In the first, workers were killed without waiting for all three to be at work,
  with a load average of up to 9 on two cores. In 14 such rounds omniq lost nothing, but three times a task ran twice, two tasks
  became dead letters since three workers had died under them, and in two rounds, with often but one worker up, tasks came
  back only after up to 17 and 36 s. Queues whose workers start slowly fared worse for no fault of theirs, so that those
  rounds were put aside for all.
- Every adapter is in `chaos/peers/adapters/`, at most a hundred lines: whoever knows a queue better is welcome to set it better.
"""


def page(results: Results) -> str:
    """The whole page."""
    parts = [
        _HEAD,
        "## What came of it\n",
        *_table(results.rows),
        f"\n{results.machine}; {results.servers}; played {_days(results.rows)}, on a machine shared with other work.",
        _FAIR,
        "## Promises and settings\n",
        *_promises(results.rows),
    ]
    return "\n".join(parts)


def _table(rows: Iterable[Row]) -> Iterable[str]:
    yield (
        "| queue | on | | kills | acknowledged | interrupted runs | lost | failed | later | "
        "ran twice | back after, s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        count = row.count
        counted = (count.lost, count.failed, count.held, count.ran_twice)
        yield (
            f"| {row.peer} | {row.store} | {row.profile} | {count.kills} | {count.acknowledged} | "
            f"{count.interrupted} | {' | '.join(map(_number, counted))} | {_times(row)} |"
        )


def _promises(rows: list[Row]) -> Iterable[str]:
    for peer in PEERS:
        versions = next((row.versions for row in rows if row.peer == peer.name), {})
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield f"### {peer.name}\n"
        yield f"{named}. Promises: {peer.promise}. {peer.remark}\n"
        yield "| | settings | comes back by itself |"
        yield "|---|---|---|"
        for profile in peer.profiles:
            yield f"| {profile.name} | {_settings(profile)} | {_returns(profile)} |"
        yield ""


def _settings(profile: Profile) -> str:
    words = (f"`{name}={json.dumps(value)}`" for name, value in profile.settings.items())
    return ", ".join(words) or "none"


def _returns(profile: Profile) -> str:
    if profile.returns_after is None:
        return "no"
    return f"after {profile.returns_after:g} s"


def _times(row: Row) -> str:
    if row.count.recovery_p50 is None:
        return "–"
    return f"{row.count.recovery_p50:.1f} / {row.count.recovery_max:.1f}"


def _number(count: int) -> str:
    return f"**{count}**" if count else "0"


def _days(rows: Iterable[Row]) -> str:
    days = sorted({row.day for row in rows})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"


def table(rows: list[Row]) -> str:
    """The same table for a terminal."""
    cells = [
        [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        for line in _table(rows)
        if not line.startswith("|---")
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
