"""Tables for people: lists with columns, and names with values, at any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from omniq.cli.text import Text
from omniq.text.escaping import visible

Cell = str | int | Text

_GAP = 2
_SHORT_ID = 12
_MIN_COLUMNS = 3
_MIN_LAST_WIDTH = 20
_MAX_CELL = 120


def text(value: object, style: str = "") -> Text:
    """Text from the storage, on one line and cut to a maximum length."""
    shown = visible(str(value))
    if len(shown) > _MAX_CELL:
        shown = shown[: _MAX_CELL - 1] + "…"
    return Text(shown, style)


class Listing:
    """Rows under named columns, the more important ones first.

    A narrow screen omits the last columns; if not even three fit, each row is printed as a list of
    all its cells. The first column identifies the row. It is not cut, except for ids of tasks, which
    a narrow screen shows up to where they differ: commands accept the beginning of an id. A column
    called `>name` is aligned right.
    """

    def __init__(
        self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, has_task_ids: bool = False
    ) -> None:
        self._columns = columns
        self._has_task_ids = has_task_ids
        self._rows = [[_cell(cell) for cell in row] for row in rows]

    def lines(self, width: int) -> Iterator[Text]:
        rows = self._rows
        if self._has_task_ids and self._fitting(rows, width) < len(self._columns):
            rows = self._with_short_ids()
        count = self._fitting(rows, width)
        if count >= min(_MIN_COLUMNS, len(self._columns)):
            return self._table(rows, count, width)
        return self._stacked(width)

    def _with_short_ids(self) -> list[list[Text]]:
        ids = sorted({row[0].plain for row in self._rows})
        length = _SHORT_ID
        while any(one[: length - 1] == other[: length - 1] for one, other in pairwise(ids)):
            length += 1
        return [[first.between(0, length), *rest] for first, *rest in self._rows]

    def _fitting(self, rows: list[list[Text]], width: int) -> int:
        """How many of the columns fit, at least one."""
        counts = range(len(self._columns), 1, -1)
        return next((count for count in counts if self._needed(rows, count) <= width), 1)

    def _needed(self, rows: list[list[Text]], count: int) -> int:
        """The width of the first `count` columns, the last of them at its narrowest."""
        widths = self._widths(rows, count)
        return sum(widths[:-1]) + min(widths[-1], _MIN_LAST_WIDTH) + _GAP * (count - 1)

    def _widths(self, rows: list[list[Text]], count: int) -> list[int]:
        return [
            max([len(name.lstrip(">")), *(row[number].width for row in rows)])
            for number, name in enumerate(self._columns[:count])
        ]

    def _table(self, rows: list[list[Text]], count: int, width: int) -> Iterator[Text]:
        widths = self._widths(rows, count)
        widths[-1] = min(widths[-1], max(width - sum(widths[:-1]) - _GAP * (count - 1), 1))
        names = [Text(name.removeprefix(">"), "bold") for name in self._columns[:count]]
        for row in [names, *rows]:
            yield from self._row(row[:count], widths)

    def _row(self, row: Sequence[Text], widths: list[int]) -> Iterator[Text]:
        """The lines of one row; only its last cell may need more than one."""
        *_, last = row
        first_lines = [*row[:-1], *last.wrapped(widths[-1])[:1]]
        yield _line(
            [
                _padded(cell, width, name.startswith(">"))
                for cell, width, name in zip(first_lines, widths, self._columns, strict=False)
            ]
        )
        indent = sum(widths[:-1]) + _GAP * (len(widths) - 1)
        for more in last.wrapped(widths[-1])[1:]:
            yield Text.of(" " * indent, more)

    def _stacked(self, width: int) -> Iterator[Text]:
        for first, *rest in self._rows:
            yield from first.styled("bold").wrapped(width)
            for column, cell in zip(self._columns[1:], rest, strict=True):
                if cell.plain:
                    yield from Text.of(f"  {column.lstrip('>')} ", cell).wrapped(width)


class Pairs:
    """Names and values, one pair per line; pairs without a value are omitted."""

    def __init__(self, pairs: Sequence[tuple[str, Cell]]) -> None:
        cells = [(name, _cell(value)) for name, value in pairs]
        self._pairs = [(name, value) for name, value in cells if value.plain]

    def lines(self, width: int) -> Iterator[Text]:
        indent = max((len(name) for name, _ in self._pairs), default=0) + _GAP
        for name, value in self._pairs:
            first, *more = value.wrapped(max(width - indent, _MIN_LAST_WIDTH))
            yield Text.of(Text(name, "bold"), " " * (indent - len(name)), first)
            for line in more:
                yield Text.of(" " * indent, line)


def _cell(value: Cell) -> Text:
    return value if isinstance(value, Text) else text(value)


def _padded(cell: Text, width: int, is_right: bool) -> Text:
    space = " " * (width - cell.width)
    return Text.of(space, cell) if is_right else Text.of(cell, space)


def _line(cells: Sequence[Text]) -> Text:
    """The cells beside each other, without spaces at the end."""
    joined = Text.join(" " * _GAP, cells)
    return joined.between(0, len(joined.plain.rstrip()))


Renderable = str | Text | Listing | Pairs


def lines_of(thing: Renderable, width: int) -> Iterator[Text]:
    """The lines of whatever can be shown, none wider than that."""
    if isinstance(thing, Listing | Pairs):
        return thing.lines(width)
    return iter((Text(thing) if isinstance(thing, str) else thing).wrapped(width))
