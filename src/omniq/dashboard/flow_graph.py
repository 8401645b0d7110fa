"""The picture of a flow: a box for each node, one column for each layer, a line for each dependency."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from omniq.operations.flow_view import NodeInfo

MAX_NODES = 120
"""A flow with more nodes has no picture: it could not be read."""

_WIDTH, _HEIGHT = 168, 44
_COLUMN, _ROW = 232, 60
_EDGE = 4
_LONGEST_NAME = 22


class Box(msgspec.Struct, frozen=True):
    """A node at its place. `detail` is how many members of a map have ended, or its status."""

    node: NodeInfo
    x: int
    y: int
    text: str
    detail: str


class FlowGraph(msgspec.Struct, frozen=True):
    """Boxes, and the paths of the lines between them."""

    width: int
    height: int
    boxes: list[Box]
    lines: list[str]


def flow_graph(nodes: Sequence[NodeInfo]) -> FlowGraph | None:
    """The picture; None for a flow without nodes or with too many."""
    if not nodes or len(nodes) > MAX_NODES:
        return None
    columns: dict[int, list[NodeInfo]] = {}
    for node in nodes:
        columns.setdefault(node.layer, []).append(node)
    tallest = max(map(len, columns.values()))
    boxes: dict[str, Box] = {}
    for layer, column in columns.items():
        # Short columns are in the middle.
        top = _EDGE + (tallest - len(column)) * _ROW // 2
        for row, node in enumerate(column):
            boxes[node.name] = Box(
                node, _EDGE + layer * _COLUMN, top + row * _ROW, _text(node.name), _detail(node)
            )
    lines = [
        _line(boxes[source], boxes[node.name])
        for node in nodes
        for source in node.after
        if source in boxes
    ]
    return FlowGraph(
        width=2 * _EDGE + max(columns) * _COLUMN + _WIDTH,
        height=2 * _EDGE + (tallest - 1) * _ROW + _HEIGHT,
        boxes=list(boxes.values()),
        lines=lines,
    )


def _text(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _detail(node: NodeInfo) -> str:
    if not node.counts:
        return str(node.status)
    succeeded = node.counts.get("success", 0)
    failed = node.counts.get("failed", 0)
    return f"{succeeded} of {sum(node.counts.values())}" + (f", {failed} failed" if failed else "")


def _line(source: Box, target: Box) -> str:
    x, y = source.x + _WIDTH, source.y + _HEIGHT // 2
    end_x, end_y = target.x, target.y + _HEIGHT // 2
    middle = (x + end_x) // 2
    return f"M{x} {y}C{middle} {y} {middle} {end_y} {end_x} {end_y}"
