"""The graphs of Celery's tests that return a value, as flows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from omniq import Flow
from tests.canvas import tasks
from tests.canvas.tasks import add, add_to_each, echo, identity, total


@dataclass(frozen=True)
class Graph:
    """A flow, its result, and the cases of Celery that it stands for."""

    build: Callable[[], Flow]
    result: Any
    cases: tuple[str, ...]


GRAPHS: list[Graph] = []


def gives(result: Any, *cases: str) -> Callable[[Callable[[], Flow]], Callable[[], Flow]]:
    def register(build: Callable[[], Flow]) -> Callable[[], Flow]:
        GRAPHS.append(Graph(build, result, cases))
        return build

    return register


def chord(flow: Flow, name: str, func: Any, items: Iterable[Any], *args: Any) -> Any:
    """The sum of the results of one call for each item."""
    return flow.add(name, total, flow.map(f"{name}-part", func, items, *args))


# Chains


@gives(32, "chain.simple_chain")
def three_calls() -> Flow:
    return Flow.chain((add, 4, 4), (add, 8), (add, 16))


@gives(7, "chain.single_chain")
def one_call() -> Flow:
    return Flow.chain((add, 3, 4))


@gives([64, 65, 66, 67], "chain.complex_chain")
def a_chain_in_a_chain_before_a_group() -> Flow:
    flow = Flow()
    first = flow.add("first", add, flow.add("start", add, 2, 2), 4)
    replaced = flow.add("replaced", tasks.add_by_a_child, first, 8)
    last = flow.add("last", add, flow.add("more", add, replaced, 16), 32)
    flow.map("group", add, range(4), last)
    return flow


@gives([4, 5], "chain.group_results_in_chain")
def a_group_of_a_chain_that_ends_with_a_group() -> Flow:
    flow = Flow()
    flow.map("group", add, [1, 2], flow.add("start", add, 1, 2))
    return flow


@gives(42, "chain.chain_of_chain_with_a_single_task")
def a_chain_of_one() -> Flow:
    return Flow.chain((identity, 42))


@gives([14, 14], "chain.chain_inside_group_receives_arguments")
def a_chain_in_a_group_gets_the_result() -> Flow:
    flow = Flow()
    start = flow.add("start", add, 5, 6)
    chained = flow.add("second", add, flow.add("first", add, start, 1), 2)
    flow.add("both", identity, [chained, flow.add("other", add, start, 3)])
    return flow


@gives([1, 2, [3, 4]], "chain.group_result_not_has_cache")
def a_chain_that_ends_with_a_group_in_a_group() -> Flow:
    flow = Flow()
    first, second = flow.add("a", identity, 1), flow.add("b", identity, 2)
    five = flow.add("five", identity, 5)
    group = flow.options(after=[five]).map("group", identity, [3, 4])
    flow.add("all", identity, [first, second, group])
    return flow


@gives(8, "chain.chain_of_task_a_group_and_a_chord")
def two_groups_and_a_sum() -> Flow:
    flow = Flow()
    pair = flow.map("pair", add, [1, 1], flow.add("start", add, 1, 0))
    sums = [flow.add("left", total, pair), flow.add("right", total, pair)]
    flow.add("sum", total, sums)
    return flow


@gives(
    12,
    "chain.chain_of_chords_as_groups_chained_to_a_task_with_two_tasks",
    "chain.chain_of_chords_with_two_tasks",
)
def two_chords_with_a_task_between() -> Flow:
    flow = Flow()
    first = chord(flow, "first", add, [1, 1], flow.add("start", add, 1, 0))
    chord(flow, "second", add, [1, 1], flow.add("between", add, first, 1))
    return flow


@gives(178, "chain.chain_of_explicit_chords")
def six_chords() -> Flow:
    flow = Flow()
    result: Any = 0
    for number, addend in enumerate((1, 1, 0, 10, 0, 1)):
        result = chord(flow, f"chord-{number}", add, [addend, addend], result)
    return flow


@gives(29520, "chain.chain_of_nine_chords")
def nine_chords() -> Flow:
    flow = Flow()
    result: Any = 0
    for number, addend in enumerate((1, 1, 1, 1, 1, 1, 1, 1, 0)):
        result = chord(flow, f"chord-{number}", add, [addend] * 3, result)
    return flow


@gives([6, 6], "chain.chain_of_a_chord_and_a_group_with_two_tasks")
def a_chord_and_a_group() -> Flow:
    flow = Flow()
    summed = chord(flow, "chord", add, [1, 1], flow.add("start", add, 1, 0))
    flow.map("group", add, [1, 1], flow.add("more", add, summed, 1))
    return flow


def after_a_chord(steps: int) -> Callable[[], Flow]:
    def build() -> Flow:
        flow = Flow()
        result = chord(flow, "chord", add, [1, 1], 1)
        for number in range(steps):
            result = flow.add(f"step-{number}", add, result, 1)
        flow.map("group", add, [1, 1], result)
        return flow

    return build


gives([6, 6], "chain.chain_of_a_chord_and_a_task_and_a_group")(after_a_chord(1))
gives([7, 7], "chain.chain_of_a_chord_and_two_tasks_and_a_group")(after_a_chord(2))
gives([8, 8], "chain.chain_of_a_chord_and_three_tasks_and_a_group")(after_a_chord(3))


@gives([42, 42], "chain.nested_chain_group_lone", "group.group_lone")
def only_a_group() -> Flow:
    return Flow.group(identity, [42, 42])


@gives([42, 42], "chain.nested_chain_group_mid")
def a_group_within_a_chain() -> Flow:
    flow = Flow()
    start = flow.add("start", identity, 42)
    pair = [flow.add("left", identity, start), flow.add("right", identity, start)]
    flow.add("end", identity, pair)
    return flow


@gives([42, 42], "chain.nested_chain_group_last")
def a_group_at_the_end_of_a_chain() -> Flow:
    flow = Flow()
    flow.map("group", add, [0, 0], flow.add("start", identity, 42))
    return flow


@gives(60, "chain.group_in_center_of_chain")
def chords_whose_callbacks_are_graphs() -> Flow:
    flow = Flow()
    header = flow.map("header", add, [0], 1)
    sums = [flow.add("left", total, header), flow.add("right", total, header)]
    pair = flow.map("pair", add, [8, 16], flow.add("sum", total, sums))
    flow.add("end", add, flow.add("both", total, pair), 32)
    return flow


@gives(42, "chain.task_replaced_with_chain")
def a_task_that_is_two_children() -> Flow:
    return Flow.chain((tasks.identity_by_children, 42))


@gives(42, "chain.chain_child_replaced_with_chain_first")
def children_at_the_start() -> Flow:
    return Flow.chain((tasks.identity_by_children, 42), identity)


@gives(42, "chain.chain_child_replaced_with_chain_middle")
def children_within() -> Flow:
    return Flow.chain((identity, 42), tasks.identity_by_children, identity)


@gives(42, "chain.chain_child_replaced_with_chain_last")
def children_at_the_end() -> Flow:
    return Flow.chain((identity, 42), tasks.identity_by_children)


@gives(10, "chain.chain_error_handler_with_eta")
def a_group_that_is_delayed() -> Flow:
    flow = Flow()
    delayed = flow.options(delay=0.1).map("part", add, [1, 5], 2)
    flow.add("sum", total, delayed)
    return flow


@gives(3, "chain.chord_soft_timeout_recuperation")
def a_member_that_handles_its_own_timeout() -> Flow:
    flow = Flow()
    late = flow.add("late", tasks.sum_within, [100], 0.01)
    flow.add("sum", total, [flow.add("three", add, 1, 2), late])
    return flow


# Groups


@gives([], "group.empty_group_result")
def an_empty_group() -> Flow:
    return Flow.group(identity, [])


@gives([11, [101, [1001, 2001]]], "group.nested_group")
def groups_in_groups() -> Flow:
    flow = Flow()
    inner = flow.map("inner", add, [1000, 2000], 1)
    middle = [flow.add("middle", add, 1, 100), inner]
    flow.add("all", identity, [flow.add("outer", add, 1, 10), middle])
    return flow


@gives(list(range(1000)), "group.large_group")
def a_thousand_members() -> Flow:
    return Flow.group(identity, range(1000))


@gives([[42, 42]], "group.nested_group_group", "chord.nested_chord_group_chain_group_tail")
def a_group_of_one_group() -> Flow:
    flow = Flow()
    start = flow.add("start", identity, 42)
    flow.add("outer", identity, [flow.map("inner", add, [0, 0], start)])
    return flow


@gives([[42]], "group.nested_group_chord_counting_simple", "group.nested_group_chord_body_chain")
def a_chord_in_a_group() -> Flow:
    flow = Flow()
    body = flow.add("body", identity, flow.map("header", identity, [42]))
    flow.add("outer", identity, [body])
    return flow


@gives([[1337]], "group.nested_group_chord_counting_chain")
def a_chord_over_a_long_chain() -> Flow:
    flow = Flow()
    last = flow.add("link-0", identity, 1337)
    for number in range(1, 42):
        last = flow.add(f"link-{number}", identity, last)
    flow.add("outer", identity, [flow.add("body", identity, [last])])
    return flow


@gives([[1337] * 42], "group.nested_group_chord_counting_group")
def a_chord_over_a_group() -> Flow:
    flow = Flow()
    body = flow.add("body", identity, flow.map("header", identity, [1337] * 42))
    flow.add("outer", identity, [body])
    return flow


@gives([[31337]], "group.nested_group_chord_counting_chord")
def a_chord_over_a_chord() -> Flow:
    flow = Flow()
    header = flow.map("header", identity, [1337] * 42)
    inner = flow.options(after=[header]).add("inner", identity, 31337)
    flow.add("outer", identity, [flow.add("body", identity, [inner])])
    return flow


@gives([[42, 42, [42] * 42, 1337]], "group.nested_group_chord_counting_mixed")
def a_chord_over_everything() -> Flow:
    flow = Flow()
    last = flow.add("link-0", identity, 42)
    for number in range(1, 42):
        last = flow.add(f"link-{number}", identity, last)
    group = flow.map("group", identity, [42] * 42)
    header = flow.map("header", identity, [42] * 42)
    inner = flow.options(after=[header]).add("inner", identity, 1337)
    body = flow.add("body", identity, [flow.add("one", identity, 42), last, group, inner])
    flow.add("outer", identity, [body])
    return flow


@gives([42, 1337], "group.group_child_replaced_with_chain_first")
def a_group_whose_first_member_is_children() -> Flow:
    flow = Flow()
    first = flow.add("first", tasks.identity_by_children, 42)
    flow.add("all", identity, [first, flow.add("last", identity, 1337)])
    return flow


@gives(
    [42, 1337, 31337],
    "group.group_child_replaced_with_chain_middle",
    "chord.chord_header_child_replaced_with_chain_middle",
)
def a_group_with_children_within() -> Flow:
    flow = Flow()
    first = flow.add("first", identity, 42)
    middle = flow.add("middle", tasks.identity_by_children, 1337)
    flow.add("all", identity, [first, middle, flow.add("last", identity, 31337)])
    return flow


@gives(
    [42, 1337],
    "group.group_child_replaced_with_chain_last",
    "chord.chord_header_child_replaced_with_chain_last",
)
def a_group_whose_last_member_is_children() -> Flow:
    flow = Flow()
    first = flow.add("first", identity, 42)
    flow.add("all", identity, [first, flow.add("last", tasks.identity_by_children, 1337)])
    return flow


@gives([[3, 2], [5, 4]] * 10, "group.task_replace_with_group_preserves_group_order")
def members_that_are_groups_stay_in_order() -> Flow:
    return Flow.group(tasks.add_to_each_by_children, [[2, 1], [4, 3]] * 10, 1)


# Chords


@gives(4, "chord.simple_chord_with_a_delay_in_group_save")
def a_simple_chord() -> Flow:
    flow = Flow()
    chord(flow, "sum", add, [1, 1], 1)
    return flow


@gives(list(range(10)), "chord.chord_order")
def results_in_the_order_of_the_members() -> Flow:
    flow = Flow()
    flow.add("body", identity, flow.map("header", identity, range(10)))
    return flow


@gives([29, 38], "chord.replaced_nested_chord")
def chords_in_a_chord_with_children() -> Flow:
    flow = Flow()
    sums = []
    for name, first, second, more in (("a", (1, 2), (3, 4), 5), ("b", (6, 7), (0, 0), 8)):
        parts = [
            flow.add(f"{name}-1", add, *first),
            flow.add(f"{name}-2", tasks.add_by_a_child, *second),
        ]
        each = flow.add(f"{name}-each", add_to_each, parts, more)
        sums.append(flow.add(f"{name}-sum", total, each))
    flow.add("body", add_to_each, sums, 9)
    return flow


@gives([12, 13, 14, 15], "chord.group_chain")
def a_group_within_a_chain_of_lists() -> Flow:
    flow = Flow()
    group = flow.map("group", add, range(4), flow.add("start", add, 2, 2))
    flow.add("end", add_to_each, group, 8)
    return flow


@gives(11, "chord.nested_group_chain")
def a_call_after_a_nested_group() -> Flow:
    flow = Flow()
    start = flow.add("start", add, 1, 0)
    first = flow.options(after=[start]).add("first", add, 1, 100)
    second = flow.options(after=[start]).add("second", add, 1, 200)
    inner = flow.options(after=[second]).map("inner", add, [1000, 2000], 1)
    flow.options(after=[first, inner]).add("end", add, 1, 10)
    return flow


@gives([16], "chord.single_task_header")
def a_chord_over_one_task() -> Flow:
    flow = Flow()
    flow.add("body", add_to_each, [flow.add("only", add, 2, 5)], 9)
    return flow


@gives([], "chord.empty_header_chord")
def a_chord_over_nothing() -> Flow:
    flow = Flow()
    flow.add("body", add_to_each, flow.map("header", identity, []), 9)
    return flow


@gives([[3, 7, 5, "A"], [13, 10, "A"]], "chord.nested_chord")
def chords_in_a_chord() -> Flow:
    flow = Flow()
    first = [flow.add("a", add, 1, 2), flow.add("b", add, 3, 4)]
    left = flow.add("left", add, first, [5])
    right = flow.add("right", add, [flow.add("c", add, 6, 7)], [10])
    flow.add("body", add_to_each, [left, right], ["A"])
    return flow


@gives([10, 10], "chord.parallel_chords")
def two_chords_side_by_side() -> Flow:
    flow = Flow()
    left = flow.add("left", total, [flow.add("a", add, 1, 2), flow.add("b", add, 3, 4)])
    right = flow.add("right", total, [flow.add("c", add, 1, 2), flow.add("d", add, 3, 4)])
    flow.add("both", identity, [left, right])
    return flow


@gives(4, "chord.chord_in_chords_with_chains")
def chords_at_the_ends_of_chains_in_a_chord() -> Flow:
    flow = Flow()
    ends = []
    for name in ("left", "right"):
        first = flow.add(f"{name}-1", add, 1, 2)
        pair = flow.options(after=[first]).map(f"{name}-pair", add, [2, 2], 1)
        ends.append(flow.options(after=[pair]).add(f"{name}-end", add, 1, 2))
    flow.options(after=ends).add("body", add, 2, 2)
    return flow


@gives(7, "chord.chain_chord_chain_chord")
def a_chord_within_the_header_of_a_chord() -> Flow:
    flow = Flow()
    one = flow.add("one", identity, 1)
    two = flow.options(after=[one]).add("two", identity, 2)
    three = flow.options(after=[one]).add("three", identity, 3)
    inner = flow.options(after=[three]).map("inner", identity, [4, 5])
    six = flow.options(after=[inner]).add("six", identity, 6)
    flow.options(after=[two, six]).add("seven", identity, 7)
    return flow


@gives([1, 1], "chord.chord_in_chain_with_args")
def a_chord_that_starts_with_a_value() -> Flow:
    flow = Flow()
    body = flow.add("body", identity, flow.map("header", identity, [1, 1]))
    flow.add("end", identity, body)
    return flow


@gives(1, "chord.chain_in_chain_with_args")
def a_chain_that_starts_with_a_value() -> Flow:
    return Flow.chain((identity, 1), identity)


@gives(499500, "chord.large_header")
def a_sum_of_a_thousand() -> Flow:
    flow = Flow()
    chord(flow, "sum", identity, range(1000))
    return flow


@gives(1000, "chord.chain_to_a_chord_with_large_header")
def a_sum_of_a_thousand_after_a_task() -> Flow:
    flow = Flow()
    chord(flow, "sum", add, [0] * 1000, flow.add("start", identity, 1))
    return flow


@gives(10, "chord.generator")
def a_chord_over_a_generator() -> Flow:
    flow = Flow()
    chord(flow, "sum", identity, (number for number in range(5)))
    return flow


@gives([42, 42], "chord.nested_chord_group")
def a_chord_over_one_group() -> Flow:
    flow = Flow()
    flow.add("body", identity, flow.map("header", identity, [42, 42]))
    return flow


@gives([42], "chord.chord_header_task_replaced_with_chain")
def a_header_of_children() -> Flow:
    flow = Flow()
    flow.add("body", identity, flow.map("header", tasks.identity_by_children, [42]))
    return flow


@gives([42, 1337], "chord.chord_header_child_replaced_with_chain_first")
def a_header_whose_first_member_is_children() -> Flow:
    flow = Flow()
    first = flow.add("first", tasks.identity_by_children, 42)
    flow.add("body", identity, [first, flow.add("last", identity, 1337)])
    return flow


def with_a_body(*body: Any) -> Callable[[], Flow]:
    def build() -> Flow:
        flow = Flow()
        result = flow.map("header", identity, [42])
        for number, func in enumerate(body):
            result = flow.add(f"body-{number}", func, result)
        return flow

    return build


_IDENTITY, _CHILDREN = identity, tasks.identity_by_children
gives([42], "chord.chord_body_task_replaced_with_chain")(with_a_body(_CHILDREN))
gives([42], "chord.chord_body_chain_child_replaced_with_chain_first")(
    with_a_body(_CHILDREN, _IDENTITY)
)
gives([42], "chord.chord_body_chain_child_replaced_with_chain_middle")(
    with_a_body(_IDENTITY, _CHILDREN, _IDENTITY)
)
gives([42], "chord.chord_body_chain_child_replaced_with_chain_last")(
    with_a_body(_IDENTITY, _CHILDREN)
)


# Each call once, in order. The result of a flow of echoes is the last word.


def echoes(*groups: str) -> Callable[[], Flow]:
    """Groups of calls, each after all calls of the group before it."""

    def build() -> Flow:
        flow = Flow()
        before: list[Any] = []
        for number, words in enumerate(groups):
            before = [
                flow.options(after=before).add(f"call-{number}-{place}", echo, word)
                for place, word in enumerate(words)
            ]
        return flow

    return build


ECHOES = {
    "chain.group_chord_group_chain": ("abc", "d", "ef"),
    "chain.chaining_upgraded_chords_pure_groups": ("123", "456", "7", "8", "9"),
    "chain.chaining_upgraded_chords_starting_with_chord": ("123", "456", "7", "8", "9"),
    "chain.chaining_upgraded_chords_mixed_canvas": ("123", "456", "7", "8", "9"),
    "chain.chaining_upgraded_chords_mixed_canvas_protocol_2": ("12", "345", "6789", "D"),
    "chain.upgrade_to_chord_inside_chains": ("ac", "de", "f", "b"),
}
"""By case: the groups of calls, each of which runs after all of the one before it."""
