"""`RESULTS.md`, made in whole from the numbers and from what the peers' files say."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measurements import Numbers
from benchmarks.must import Line, in_unit, judge
from benchmarks.roster import OMNIQ, Peer
from benchmarks.stores import ABOUT, STORES

COLUMNS = {
    "drain": "drain/s",
    "cpu": "CPU µs",
    "server_cpu": "server µs",
    "bulk": "bulk/s",
    "single": "single/s",
    "together": "together/s",
    "latency": "latency ms",
    "rss": "RSS MB",
}
LESS_IS_BETTER = {"cpu", "server_cpu", "latency", "rss"}

INTRODUCTION = """\
# How fast omniq is

Made by `make bench PEERS=1`; `results.json` has the numbers of each round. [README.md](README.md) says how to run it, what
each figure is, and how a peer is added. All were measured in one way, interleaved, on the same servers. Every run
checked that no task ran twice and none was left lying.
"""


def page(numbers: Numbers, peers: dict[str, Peer]) -> str:
    lines = judge(numbers, peers)
    parts = [
        INTRODUCTION,
        *_setting(numbers),
        *_table(lines),
        *_behind(lines, numbers, peers),
        *_stores(numbers, peers),
        *_growth(numbers),
        *_tuned(numbers, peers),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _setting(numbers: Numbers) -> Iterator[str]:
    about = numbers.about
    yield f"- **When:** {about.get('date', '?')}, load {about.get('load', '?')} at the start"
    if len({*numbers.measured().values()}) > 1:
        yield "- **Not in one run:** each store says when and where it was measured"
    if "note" in about:
        yield f"- **Note:** {about['note']}"
    yield f"- **Machine:** {about.get('machine', '?')}"
    speed = numbers.middle("memory", "bare", "cpu")
    if speed is not None:
        yield f"- **Its speed:** {speed:.2f} µs of CPU for `create_task` and a callback, stock loop"
    yield f"- **Servers:** {', '.join(sorted({*about.get('servers', {}).values()} - {''}))}"
    yield (
        f"- **Runs:** medians of {about.get('rounds', '?')} rounds of {about.get('tasks', 0):,} tasks "
        f"(files: {about.get('file_tasks', 0):,}); enqueues and drains are cut off after "
        f"{about.get('seconds', '?')} s, and rates are of what was done"
    )
    yield ""


def _table(lines: list[Line]) -> Iterator[str]:
    yield "## What omniq must show\n"
    yield "One worker process, 100 tasks at a time, results kept, unless a line says otherwise.\n"
    yield "| figure | against | must | stretch | is | holds |"
    yield "|---|---|---|---|---|---|"
    for line in lines:
        yield (
            f"| {line.figure} | {line.against} | {line.must} | {in_unit(line.stretch, line.unit)} "
            f"| {_value(line)} | {_verdict(line)} |"
        )
    yield ""


def _value(line: Line) -> str:
    return "not measured" if line.value is None else f"**{in_unit(line.value, line.unit)}**"


def _verdict(line: Line) -> str:
    return {True: "yes", False: "**no**", None: ""}[line.holds]


def _behind(lines: list[Line], numbers: Numbers, peers: dict[str, Peer]) -> Iterator[str]:
    yield "## Where omniq is behind\n"
    found = [
        f"- {line.figure}: {_value(line)} where {line.must} is wanted"
        + (f" (against {line.against})" if line.against else "")
        for line in lines
        if line.holds is False
    ]
    for store in STORES:
        for figure, title in COLUMNS.items():
            is_least = figure in LESS_IS_BETTER
            best = numbers.best(store, figure, list(peers.values()), least=is_least)
            own = numbers.middle(store, OMNIQ, figure)
            if best is None or own is None:
                continue
            other = numbers.middle(store, best, figure) or 0.0
            if (own > other) if is_least else (own < other):
                found.append(f"- {store}, {title}: {_short(own)}, and {best} {_short(other)}")
    yield from found or ["Nowhere in what was measured."]
    yield from (
        f"- {name} could not be measured: {text}" for name, text in numbers.failures.items()
    )
    yield ""


def _stores(numbers: Numbers, peers: dict[str, Peer]) -> Iterator[str]:
    yield "## Store by store\n"
    yield "CPU is of the worker's processes and of the server, for each task of the drain.\n"
    for store in STORES:
        subjects = numbers.subjects(store)
        if not subjects:
            continue
        order = [*(name for name in peers if name in subjects), *(set(subjects) - set(peers))]
        yield f"### {store}\n\n{ABOUT[store]} Measured {numbers.measured()[store]}.\n"
        yield f"| | {' | '.join(COLUMNS.values())} | keeps |"
        yield "|---" * (len(COLUMNS) + 2) + "|"
        for subject in sorted(order, key=lambda name: _rank(numbers, store, name)):
            cells = [_short(numbers.middle(store, subject, figure)) for figure in COLUMNS]
            keeps = peers[subject].keeps if subject in peers else ""
            yield f"| {subject} | {' | '.join(cells)} | {keeps} |"
        two = numbers.middle(store, OMNIQ, "processes")
        if two is not None:
            yield f"\nomniq with two worker processes: {_short(two)} a second."
        yield ""


def _rank(numbers: Numbers, store: str, subject: str) -> tuple[bool, float]:
    """omniq and its peers by their drain, then what is not a queue."""
    return subject in ("raw", "bare"), -(numbers.middle(store, subject, "drain") or 0.0)


def _growth(numbers: Numbers) -> Iterator[str]:
    rows = [
        (store, figure, numbers.middle(store, OMNIQ, figure) or 0.0)
        for store in STORES
        for figure in sorted(numbers.figures(store, OMNIQ))
        if figure.startswith("growth_")
    ]
    if not rows:
        return
    yield "## Growth\n"
    yield "The rate of 20,000 tasks in a crowded store as a share of the rate in an empty one: behind them so"
    yield "many queued; then, when those have run, beside so many finished; then as many due in an hour as well.\n"
    yield "| store | beside | share |\n|---|---|---|"
    for store, figure, share in rows:
        _, stage, others = figure.split("_")
        yield f"| {store} | {int(others):,} {stage} | {share:.2f} |"
    yield ""


def _tuned(numbers: Numbers, peers: dict[str, Peer]) -> Iterator[str]:
    yield "## Versions and settings\n"
    yield "| | versions | how it runs |\n|---|---|---|"
    versions: dict[str, dict[str, str]] = numbers.about.get("versions", {})
    for name, peer in peers.items():
        if name in versions:
            listed = ", ".join(
                f"{each} {number}" for each, number in sorted(versions[name].items())
            )
            yield f"| {name} | {listed} | {peer.tuned.partition(': ')[2]} |"


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
