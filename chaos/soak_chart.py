"""Draws the curves of a soak as one chart for light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from chaos.curves import Curve, Curves

_WIDTH, _HEIGHT = 960, 668
_LEFT, _RIGHT, _TOP = 76, 24, 84
_PANEL, _GAP = 132, 26
_STRIPS = _TOP + 3 * (_PANEL + _GAP)
_STRIP = 15
_PANELS = (("megabytes", "RSS, MB"), ("files", "open files"), ("threads", "threads"))
_HARM = (("kill", "SIGKILL"), ("stop", "SIGSTOP"), ("restart", "restart"))

_STYLE = """
    .back { fill: #ffffff }
    .warm { fill: #f1f5f9 }
    .grid { stroke: #cbd5e1; stroke-width: 1 }
    .text { font: 13px system-ui, sans-serif; fill: #334155 }
    .title { font: 600 17px system-ui, sans-serif; fill: #0f172a }
    .last { text-anchor: end }
    .middle { text-anchor: middle }
    .line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
    .one { stroke: #4f46e5 } .two { stroke: #c2410c } .three { stroke: #047857 }
    .harm { stroke: #b91c1c; stroke-width: 1 }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0f172a }
      .warm { fill: #1e293b }
      .grid { stroke: #475569 }
      .text { fill: #cbd5e1 }
      .title { fill: #f1f5f9 }
      .one { stroke: #a5b4fc } .two { stroke: #fdba74 } .three { stroke: #6ee7b7 }
      .harm { stroke: #f87171 }
    }
"""
_COLOURS = ("one", "two", "three")


def draw(curves: Curves, backend: str) -> str:
    """Return an SVG with memory, files and threads of each process, and every fault."""
    title = f"omniq on {backend}: {curves.minutes:.0f} minutes of work and harm"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
        _text(_LEFT, 30, title, "title"),
        *_legend(curves),
        *_warm_up(curves),
    ]
    for number, (what, label) in enumerate(_PANELS):
        parts += _panel(curves, what, label, _TOP + number * (_PANEL + _GAP))
    parts += [*_harm(curves), *_minutes(curves), "</svg>"]
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, text: str, kind: str = "text") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _x(curves: Curves, minute: float) -> float:
    width = _WIDTH - _LEFT - _RIGHT
    return round(_LEFT + width * minute / max(curves.minutes, 0.01), 1)


def _legend(curves: Curves) -> Iterator[str]:
    x = _LEFT
    for colour, (name, curve) in zip(_COLOURS, curves.processes.items(), strict=True):
        slope = curve.after(curves.warm_up).slope
        yield f'<path class="line {colour}" d="M{x},52h24"/>'
        yield _text(x + 32, 57, f"{name} ({slope:+.2f} MB an hour)")
        x += 250


def _warm_up(curves: Curves) -> Iterator[str]:
    width = _x(curves, curves.warm_up) - _LEFT
    height = _STRIPS - _TOP - _GAP
    yield f'<rect class="warm" x="{_LEFT}" y="{_TOP}" width="{width:g}" height="{height}"/>'
    yield _text(_LEFT + 6, _TOP + 16, "warm-up")


def _panel(curves: Curves, what: str, label: str, top: int) -> Iterator[str]:
    """Draw one panel. Its axis starts at zero, so that slopes are not exaggerated."""
    highest = max(max(getattr(curve, what)) for curve in curves.processes.values())
    step = _step(highest)
    most = step * (int(highest / step) + 1)
    for value in range(0, most + 1, step):
        y = round(top + _PANEL * (1 - value / most), 1)
        yield f'<path class="grid" d="M{_LEFT},{y:g}H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 8, y + 4, str(value), "text last")
    middle = top + _PANEL / 2
    yield (
        f'<text class="text middle" transform="translate(22 {middle:g}) rotate(-90)">'
        f"{escape(label)}</text>"
    )
    for colour, curve in zip(_COLOURS, curves.processes.values(), strict=True):
        points = " ".join(_points(curves, curve, getattr(curve, what), top, most))
        yield f'<polyline class="line {colour}" points="{points}"/>'


def _step(highest: float) -> int:
    """Return a step that gives about four lines.

    >>> [_step(highest) for highest in (3, 8, 29, 61)]
    [1, 2, 10, 20]
    """
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if highest / step < 5)


def _points(
    curves: Curves, curve: Curve, values: Sequence[float], top: int, most: int
) -> Iterator[str]:
    """Yield all points except those inside a horizontal section."""
    ends = {0, len(values) - 1}
    for number, value in enumerate(values):
        around = values[max(0, number - 1) : number + 2]
        if number in ends or any(other != value for other in around):
            y = round(top + _PANEL * (1 - value / most), 1)
            yield f"{_x(curves, curve.minutes[number]):g},{y:g}"


def _harm(curves: Curves) -> Iterator[str]:
    """Draw a row for each kind of fault, with a mark for each time."""
    for number, (what, label) in enumerate(_HARM):
        if what not in curves.harm:
            continue
        y = _STRIPS + number * (_STRIP + 4)
        strokes = "".join(f"M{_x(curves, at):g},{y}v{_STRIP}" for at in _within(curves, what))
        yield f'<path class="harm" d="{strokes}"/>'
        yield _text(_LEFT - 8, y + 12, label, "text last")


def _within(curves: Curves, what: str) -> list[float]:
    return [at for at in curves.harm[what] if 0 <= at <= curves.minutes]


def _minutes(curves: Curves) -> Iterator[str]:
    y = _STRIPS + len(_HARM) * (_STRIP + 4) + 16
    step = _step(max(curves.minutes, 1.0)) if curves.minutes < 30 else 10
    for minute in range(0, int(curves.minutes) + 1, step):
        yield _text(_x(curves, minute), y, str(minute), "text middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, y + 18, "minutes", "text middle")
