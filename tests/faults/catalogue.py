"""The faults that omniq is made to survive, and the tests that show it: docs/reference/faults.md.

A test shows a fault when it is marked with the fault's number, `@pytest.mark.fault("F07")`, and
such a test must fail when nothing goes wrong in it. `python -m tests.faults.catalogue` writes the
page anew; a test compares the two.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"

FAULTS = {
    "Processes die": """
F01 | A worker is killed at any moment | What it ran is begun again when its lease has ended; nothing is lost
F02 | A worker is killed at each named point of claim, run, record, recover and enqueue | The same, at every point
F03 | A producer does not learn whether its enqueue was done | Doing it again gives one task, or says that it is there
F04 | A task's child process is killed, exits or crashes | That one attempt fails and says how; its neighbours go on
F05 | A task's child process runs out of memory and is killed | As F04; a dead letter when its retries are used up
F06 | A whole worker is killed, as when memory runs out | As F01, and counted against the task that was running
F07 | A task kills every worker that runs it | A dead letter after exactly three crashes; all others are done
F08 | SIGTERM while tasks run | No new claims; tasks get their grace; the rest is given back uncharged; exit 0
F09 | A second signal, SIGINT or SIGQUIT | It ends within a second
F10 | SIGTERM while the storage is away | It ends in bounded time and says that it could not give back
F11 | The terminal, or whoever reads the log, goes away | Work goes on
F12 | The parent of worker processes is killed | They notice, give back what they hold and end
F13 | A fork while other threads hold locks | Children are started afresh and inherit no lock
F14 | A thousand short-lived children | No zombie and no open file is left
""",
    "Pauses, leases and fencing": """
F15 | A worker is stopped past its lease and resumed | Another ran the task; the late outcome is refused
F16 | A worker is stopped right before it records | The same
F17 | A worker is stopped between claim and start | It does not start a task whose lease has ended
F18 | A task blocks the event loop for many leases | The lease is kept by a thread of its own; nobody else starts the task
F19 | A task holds the interpreter lock | In a process of its own it cannot keep the worker from renewing
F20 | Renewals fail for a while | Nothing is lost and nothing runs twice
F21 | Renewals fail until the lease ends | The worker stops its run before anybody else may start it
F22 | The reply to a renewal is lost | It is made again and means the same
F23 | A worker's clock is an hour off | Leases go by the store's clock: nothing is taken early
F24 | The wall clock jumps while everything runs | Schedules fire each time once; no storm; leases stay
F25 | Many claim at once | Each task goes to one
F26 | A lease or an interval that makes no sense | Refused at the start; renewals follow from the lease
F27 | Whoever recovers is killed in the midst of it | The next one finishes it; no lock outlives its owner
F28 | Recovery and the late outcome meet | One of them counts
F29 | A worker restarts under the same name | Every start is a new owner; no lease is adopted
F30 | A running task is cancelled by an operator | It is told to stop and ends as cancelled, whatever it returns
""",
    "Servers and networks": """
F31 | The server is killed and restarted again and again | Workers resume by themselves each time
F32 | The server is away when an outcome is to be recorded | The outcome is kept and recorded when it is back
F33 | The server stands still for seconds | Calls wait or fail in bounded time, then go on
F34 | A silent partition | The worker stops its task before another starts it, and comes back
F35 | Single connections are cut | Each task still runs once
F36 | The reply of any command is lost | Nothing is lost or doubled
F37 | The server answers with garbage | A typed error, no crash, no wrong data
F38 | A slow server | Leases are kept, tasks run once
F39 | The server loses what it acknowledged | A durable one does not; `omniq doctor` warns of one that may
F40 | Redis evicts keys or runs out of memory | Refused at connect; when full, enqueues are refused and runs can finish
F41 | Keys in Redis are deleted by hand | Nobody is held up; the store takes tasks again
F42 | Redis forgets its scripts, or is a replica for a while | They are loaded again; it is waited for
F43 | PostgreSQL: locks, ended sessions, wrong rights | Bounded waiting and retries, typed errors
F44 | PostgreSQL behind a pooler without sessions | Everything works by polling
F45 | PostgreSQL with bloated tables | Claims stay bounded
F46 | NATS: consumers, streams and limits | Typed errors
F47 | S3: conflicts and slow-downs | A claim is made once
F48 | The server is away for long | It is waited for with longer and longer pauses, and told of once
F49 | Two hundred workers reconnect at once | They come back spread out
F50 | A server with a certificate that nobody vouches for | Refused before anything is said
""",
    "Files and disks": """
F51 | The power is cut | What was acknowledged is there and whole
F52 | Any system call of the file store fails, or is the last | The caller hears of it; the store is whole
F53 | A sync fails | The task is not acknowledged and not left behind
F54 | The disk is full | A clear error; nothing torn; it works again when there is room
F55 | The disk is read-only for a while | A clear error; it works again afterwards
F56 | No file descriptors are left | A typed error; it works again afterwards
F57 | Files may not grow | No torn record
F58 | Empty, cut, flipped, foreign and future records | Set aside with the reason; never run; nobody is held up
F59 | Links, pipes, sockets, folders and odd names in the store | Ignored or set aside; nothing hangs
F60 | Half-finished changes of somebody who died | Whoever comes by finishes them
F61 | A folder with very many tasks | A claim costs the same
F62 | A file system that cannot do what is needed | Refused when the store is opened
F63 | Time stamps of files go back | Nothing depends on them
F64 | SQLite: busy, locked, full, deleted, replaced, of another version | Patience, then typed errors; nothing is taken for what it is not
""",
    "Payloads and results": """
F65 | Payloads of any size | A limit that holds at both ends
F66 | Nested a hundred thousand deep | Refused at both ends
F67 | A compressed or declared giant | Nothing is ever decompressed, and no declared size believed
F68 | Numbers: NaN, infinities, huge ones, -0.0, decimals | Come back the same, or are refused at enqueue
F69 | Text: surrogates, NUL, directions, any script | Come back the same, or are refused at enqueue
F70 | Objects, functions, files, what refers to itself | Refused with the path of the value
F71 | A result that cannot be carried | Failed for good, and not run again
F72 | A coroutine or generator where a value is expected | Awaited, or refused
F73 | Records of another version, with fields missing or of wrong types | Dead letters, or set aside; nobody is held up
F74 | A function that this worker does not have | Left to others; a dead letter when nobody has it
""",
    "What user code does": """
F75 | Raises SystemExit, KeyboardInterrupt, CancelledError, StopIteration or anything else | That one attempt fails
F76 | Runs out of memory or stack | The failure is recorded outside of the deep stack
F77 | Raises exceptions that cannot be printed, pickled or bounded | Kept as bounded text
F78 | Never ends: in a thread, a process, on the loop | Stopped where that can be done; counted and the worker replaced where not
F79 | Ignores its cancellation | Told twice, then given up; a stop stays bounded
F80 | Blocks the event loop | Told of with its stack; leases stay
F81 | Leaves threads, processes and handlers behind, stops the loop | Others are not disturbed
F82 | Starts processes and threads without end | The worker stays responsive
F83 | Enqueues itself without end | A bound is a bound: the task is refused, others run
F84 | Prints much, logs what it should not | Passed through; omniq's own lines have no arguments in them
""",
    "Time, schedules and retries": """
F85 | Two workers fire schedules at once, one of them late | Each nominal time is fired once
F86 | Nobody fires for an hour or a month | The schedule's own policy decides; what is made up for is bounded
F87 | Clock changes, leap days, impossible dates | As a brute-force calendar says; never twice, never a hang
F88 | Naive, ancient and far times | Naive ones are refused; all others are exact to the microsecond
F89 | Negative, infinite and absurd durations and counts | Refused before anything is written
F90 | All tasks fail at once | Retries spread out; a breaker holds them without spending attempts
F91 | A dependency flaps, a probe dies | One probe at a time; held tasks are not lost
F92 | Chains of tasks with missing links | -
""",
    "Load and life": """
F93 | Another version reads and writes the same store | Newer fields are left aside; a newer format is refused
F94 | Producers are faster than workers | A bound on what waits, exact where that is promised
F95 | A flood of urgent tasks | -
F96 | Very many tasks that wait, are delayed or have ended | Claims walk over none of them
F97 | Several loops, loops within loops, forks | Works, or says what to do
F98 | Workers start while the server is away, or set up the same store at once | They wait; one sets it up
F99 | A day of work with faults | -
F100 | Readers look on while workers are killed | They see no task twice and no impossible state, and are in nobody's way
""",
}

OPEN = {
    "F45": "Claims read by index alone, which is tested; a bloated table itself was not measured.",
    "F46": "There is no NATS backend.",
    "F47": "There is no S3 backend.",
    "F49": "Pauses are drawn by chance on every backend; two hundred workers were not tried.",
    "F82": "A process task has no limits of its own: set them for the whole worker (cgroup, ulimit).",
    "F92": "There are no chains of tasks.",
    "F95": "Priorities are strict, and that is documented: keep urgent work in a queue of its own.",
    "F99": "`make chaos HOURS=n` runs it; no day-long run is on record yet.",
}


def faults() -> dict[str, tuple[str, str, str]]:
    """Each fault by its number: its group, what happens, and what is expected."""
    found = {}
    for group, lines in FAULTS.items():
        for line in lines.strip().splitlines():
            number, what, expected = (part.strip() for part in line.split("|"))
            found[number] = (group, what, expected)
    return found


def marked() -> dict[str, list[str]]:
    """The tests that are marked with each number, as `path::name`."""
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
    """The page that the marks and the catalogue make."""
    tests = marked()
    handled = [number for number in faults() if tests.get(number) and number not in OPEN]
    lines = [
        "# Faults",
        "",
        "What can go wrong, what omniq does then, and the tests in which it does go wrong. Each test",
        "is marked with the number of its fault and fails when nothing is injected. This page is made",
        "by `python -m tests.faults.catalogue`, and a test keeps it from saying anything else.",
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
