"""Lists the faults that omniq handles and writes the page about them, docs/reference/faults.md.

A test shows a fault if it is marked with the fault's number, `@pytest.mark.fault("F07")`. Such a
test must fail if no fault occurs in it. `python -m tests.faults.catalogue` writes the page; a test
compares the page with the marks.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"

FAULTS = {
    "Processes die": """
F01 | A worker is killed at any moment | Its tasks start again when its lease has expired; no task is lost
F02 | A worker is killed at each named point of claim, run, record, recover and enqueue | The same, at every point
F03 | A producer does not learn whether its enqueue succeeded | Repeating it gives one task, or an error that says the task exists
F04 | A task's child process is killed, exits or crashes | That attempt fails and says how; other tasks continue
F05 | A task's child process runs out of memory and is killed | As F04; a dead letter when its retries are exhausted
F06 | A whole worker is killed, as when memory runs out | As F01, and counted as a crash of the task that was running
F07 | A task kills every worker that runs it | A dead letter after exactly three crashes; all other tasks complete
F08 | SIGTERM while tasks run | No new claims; running tasks get the shutdown timeout; the rest is released without spending an attempt; exit 0
F09 | A second signal, SIGINT or SIGQUIT | The worker ends within a second
F10 | SIGTERM while the storage is unreachable | The worker ends in bounded time and reports that it could not release its tasks
F11 | The terminal or the reader of the log closes | The worker continues
F12 | The parent of worker processes is killed | They detect it, release their tasks and end
F13 | A fork while other threads hold locks | Child processes start a new interpreter and inherit no lock
F14 | A thousand short-lived child processes | No zombie process and no open file remains
""",
    "Pauses, leases and fencing": """
F15 | A worker is paused past its lease and resumed | Another worker ran the task; the late outcome is refused
F16 | A worker is paused right before it records | The same
F17 | A worker is paused between claim and start | It does not start a task whose lease has expired
F18 | A task blocks the event loop for many leases | A dedicated thread renews the lease; no other worker starts the task
F19 | A task holds the interpreter lock | In a separate process it cannot prevent the worker from renewing
F20 | Renewals fail temporarily | No task is lost and none runs twice
F21 | Renewals fail until the lease expires | The worker stops its run before another worker may start it
F22 | The reply to a renewal is lost | The worker repeats the renewal, with the same effect
F23 | A worker's clock is an hour off | The storage's clock decides: no task is claimed early, retries and schedules are on time
F24 | The wall clock jumps while workers run | Schedules fire each nominal time once, without a burst; leases are unaffected
F25 | Many workers claim at the same time | Each task goes to one of them
F26 | An invalid lease or interval | Refused at the start; the renewal interval follows from the lease
F27 | A worker is killed while it recovers the tasks of another | The next worker completes the recovery; no lock outlives its owner
F28 | Recovery and a late outcome coincide | One of them takes effect
F29 | A worker restarts under the same name | Every start is a new owner and adopts no lease
F30 | An operator cancels a running task | The task is asked to stop and ends as CANCELLED, even if it returns a value
""",
    "Servers and networks": """
F31 | The server is killed and restarted repeatedly | Workers resume without help each time
F32 | The server is down when an outcome is to be recorded | The worker holds the outcome and records it when the server is back
F33 | The server hangs for seconds | Calls wait or fail in bounded time, then work again
F34 | A silent partition | The worker stops its task before another worker starts it, and reconnects
F35 | Single connections are cut | Each task still runs once
F36 | The reply to any command is lost | No task is lost or duplicated
F37 | The server answers with garbage | A typed error, no crash, no wrong data
F38 | A slow server | Leases are renewed in time, tasks run once
F39 | The server loses acknowledged data | A durable server does not; `omniq doctor` warns of one that may
F40 | Redis evicts keys or runs out of memory | Eviction is refused at connect; when memory is full, enqueues are refused and running tasks can finish
F41 | Keys in Redis are deleted by hand | Workers continue, and the store accepts tasks again
F42 | Redis loses its scripts, or is a replica temporarily | Workers load the scripts again, and wait for a primary
F43 | PostgreSQL: locks, terminated connections, missing privileges | Bounded waiting and retries, typed errors
F44 | PostgreSQL behind a connection pooler in transaction mode | Everything works by polling
F45 | PostgreSQL with bloated tables | The cost of a claim stays bounded
F46 | NATS: streams that are full, missing, or have other settings | Typed errors
F47 | S3: conflicts and throttling | A task is claimed once
F48 | The server is down for a long time | Workers reconnect with growing delays and report the outage once
F49 | Two hundred workers reconnect at the same time | Their reconnections are spread over time
F50 | A server with an untrusted certificate | Refused before any data is sent
""",
    "Files and disks": """
F51 | The power is cut | Acknowledged tasks are stored and intact
F52 | Any system call of the file store fails, or is the last one before a crash | The caller gets an error; the store is intact
F53 | A sync fails | The task is not acknowledged and not left in the store
F54 | The disk is full | A clear error and no torn file; the store works again when there is space
F55 | The disk is read-only temporarily | A clear error; the store works again afterwards
F56 | No file descriptors are left | A typed error; the store works again afterwards
F57 | A limit on the size of files is reached | No torn record
F58 | Empty, truncated, corrupt, foreign and newer records | Moved aside with the reason and never run; other tasks continue
F59 | Links, pipes, sockets, folders and unusual names in the store | Ignored or moved aside; no call hangs
F60 | Half-finished changes of a process that died | The next process that finds them completes them
F61 | A folder with very many tasks | A claim costs the same
F62 | A file system that lacks a required feature | Refused when the store is opened
F63 | Time stamps of files go back | Nothing depends on them
F64 | SQLite: busy, locked, full, deleted, replaced, newer version | The call waits, then raises a typed error; no other file is mistaken for the store
""",
    "Payloads and results": """
F65 | Payloads of any size | A limit, enforced by the caller and by the worker
F66 | Values nested a hundred thousand levels deep | Refused by the caller and by the worker
F67 | A payload that is compressed or declares a huge size | omniq decompresses nothing and trusts no declared size
F68 | Numbers: NaN, infinities, huge ones, -0.0, decimals | They are returned unchanged, or refused at enqueue
F69 | Text: surrogates, NUL, direction marks, any script | It is returned unchanged, or refused at enqueue
F70 | Objects, functions, files, values that contain themselves | Refused with the path of the value
F71 | A result that cannot be encoded | The task fails for good and does not run again
F72 | A coroutine or generator instead of a value | Awaited, or refused
F73 | Records of another version, with missing fields or wrong types | Dead letters, or moved aside; other tasks continue
F74 | A function that this worker does not have | Left to other workers, uncharged; it waits if no worker has it
""",
    "What user code does": """
F75 | It raises SystemExit, KeyboardInterrupt, CancelledError, StopIteration or any other exception | That attempt fails
F76 | It runs out of memory or stack | The failure is recorded outside the deep stack
F77 | It raises exceptions that cannot be printed or pickled, or are huge | They are stored as bounded text
F78 | It never ends: in a thread, in a process, on the event loop | Stopped where that is possible; otherwise counted, and the worker is replaced
F79 | It ignores its cancellation | Cancelled twice, then abandoned; a stop stays bounded
F80 | It blocks the event loop | Reported with its stack; the leases are renewed
F81 | It leaves threads, processes and signal handlers behind, or stops the event loop | Other tasks are not affected
F82 | It starts processes endlessly, or takes all memory or files | In a child process it gets no more than the settings allow, and fails; other tasks run
F83 | It enqueues itself endlessly | `max_pending` holds: the task is refused, other tasks run
F84 | It prints much, or logs secrets | Its output passes through; omniq's log lines contain no arguments
""",
    "Time, schedules and retries": """
F85 | Two workers fire schedules at the same time, one of them late | Each nominal time is fired once
F86 | No worker fires schedules for an hour or a month | The policy of the schedule decides; the number of catch-up runs is bounded
F87 | Daylight saving, leap days, impossible dates | The results match a brute-force calendar; no time is fired twice and no call hangs
F88 | Naive, ancient and far-future times | Naive ones are refused; all others are exact to the microsecond
F89 | Negative, infinite and absurd durations and counts | Refused before anything is written
F90 | All tasks fail together | Retries are spread over time; a breaker parks tasks without spending attempts
F91 | A dependency alternates between up and down, a probe dies | One probe at a time; parked tasks are not lost
F92 | Chains of tasks with missing links | The end of a task releases what waits for it in the same step; what can never run is cancelled with the cause
""",
    "Load and life": """
F93 | Another version reads and writes the same store | Newer fields are ignored; a newer format is refused
F94 | Producers are faster than workers | A bound on waiting tasks, exact where that is promised
F95 | A flood of urgent tasks | With `ageing` the others run: a step of priority is worth a time of waiting. Without it, priorities are strict
F96 | Very many waiting, delayed or finished tasks | A claim reads none of them
F97 | Several event loops, nested loops, forks | They work, or raise an error that says what to do
F98 | Workers start while the server is down, or initialize the same store at the same time | They wait; one of them initializes it
F99 | A day of work with faults | -
F100 | Readers list tasks while workers are killed | They see no task twice and no impossible state, and block no worker
""",
}

OPEN = {
    "F45": "A test shows that claims read by index only; a bloated table was not measured.",
    "F49": "Delays are random on every backend; two hundred workers were not tried.",
    "F99": "`make chaos HOURS=n` runs it; no run of a whole day is on record yet.",
}


def faults() -> dict[str, tuple[str, str, str]]:
    """Return each fault by its number: its group, what happens, and what omniq does."""
    found = {}
    for group, lines in FAULTS.items():
        for line in lines.strip().splitlines():
            number, what, expected = (part.strip() for part in line.split("|"))
            found[number] = (group, what, expected)
    return found


def marked() -> dict[str, list[str]]:
    """Return the tests that are marked with each number, as `path::name`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for number in _numbers(node):
                    found[number].append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def _numbers(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [
        argument.value
        for decorator in test.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault"
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def page() -> str:
    """Return the text of the page."""
    tests = marked()
    handled = [number for number in faults() if tests.get(number) and number not in OPEN]
    lines = [
        "# Faults",
        "",
        "What can go wrong, what omniq does then, and the tests that show it. Each test is marked",
        "with the number of its fault, and fails if the fault does not occur. This page is written",
        "by `python -m tests.faults.catalogue`; a test compares it with the marks.",
        "",
        f"{len(handled)} of {len(faults())} are handled.",
    ]
    for group in FAULTS:
        lines += [
            "",
            f"## {group}",
            "",
            "| | what happens | what omniq does | shown by |",
            "|---|---|---|---|",
        ]
        for number, (its_group, what, expected) in faults().items():
            if its_group == group:
                shown = OPEN.get(number) or "<br>".join(_shown(test) for test in tests[number])
                state = "**open**: " if number in OPEN else ""
                lines.append(f"| {number} | {what} | {expected} | {state}{shown} |")
    return "\n".join(lines) + "\n"


def _shown(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../../{path})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
