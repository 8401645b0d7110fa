"""A soak run evaluates its measurements and draws them; one short run is done here."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from chaos.curves import Curve, Curves, curves_of
from chaos.history import Event
from chaos.soak_chart import draw


def an_hour(
    grows: float = 0.0, files: int = 20, more_files: int = 0, rows: int = 100, more_rows: int = 0
) -> Curves:
    """Return the curves of an hour, one point per minute, with that growth by the end."""
    minutes = [float(minute) for minute in range(61)]
    curve = Curve(
        minutes,
        # Every second point is slightly higher, like the noise of a real curve.
        [50 + grows * minute / 60 + 0.2 * (minute % 2) for minute in minutes],
        [files + (minute % 3 == 0) + int(more_files * minute / 60) for minute in minutes],
        [5] * 61,
    )
    stored_rows = [(minute, rows + int(more_rows * minute / 60)) for minute in minutes]
    return Curves(60.0, {"worker": curve, "producer": curve, "reader": curve}, stored_rows)


def violations(curves: Curves) -> set[str]:
    return {f"{violation.subject} {violation.text}" for violation in curves.growth()}


def test_constant_use_of_resources_is_no_violation():
    assert violations(an_hour(grows=1.5)) == set()


def test_memory_that_grows_by_two_megabytes_an_hour_is_noticed():
    assert "worker grows by 2.5 MB an hour" in violations(an_hour(grows=2.5))


def test_growth_during_the_warm_up_is_ignored():
    curves = an_hour()
    worker = curves.processes["worker"]
    worker.megabytes[:9] = [20.0 + 3 * minute for minute in range(9)]

    assert violations(curves) == set()


def test_files_that_are_never_closed_are_noticed():
    assert "worker files: up to 23, then 24 at least" in violations(an_hour(more_files=6))


def test_rows_that_are_never_purged_are_noticed():
    assert any("rows" in each for each in violations(an_hour(more_rows=200)))


def test_the_memory_of_a_short_run_is_not_judged():
    curves = an_hour(grows=50)
    curves.minutes = 25.0

    assert not curves.is_long_enough_for_memory
    assert not any("MB" in each for each in violations(curves))


def test_curves_match_the_samples():
    taken = {"worker": {"megabytes": 30.5, "files": 7, "threads": 2}}
    curves = curves_of(
        [
            Event(100.0, "nemesis", "sample", value=taken),
            Event(130.0, "nemesis", "kill", value="victim-1"),
            Event(160.0, "auditor", "rows", value=12),
            Event(220.0, "nemesis", "sample", value=taken),
        ]
    )

    assert curves.processes["worker"] == Curve([0.0, 2.0], [30.5, 30.5], [7, 7], [2, 2])
    assert (curves.rows, dict(curves.harm), curves.minutes) == ([(1.0, 12)], {"kill": [0.5]}, 2.0)


def test_the_picture_names_its_axes_and_marks_each_kill():
    curves = an_hour()
    curves.harm["kill"] = [1.0, 2.0, 59.0]
    picture = ElementTree.fromstring(draw(curves, "sqlite"))
    texts = {element.text for element in picture.iter() if element.tag.endswith("text")}
    (kills,) = (each for each in picture.iter() if each.get("class") == "harm")

    assert {"RSS, MB", "open files", "threads", "minutes", "SIGKILL", "60"} <= texts
    assert kills.get("d", "").count("M") == 3


def test_a_single_sample_has_no_slope():
    assert Curve([3.0], [50.0], [7], [2]).slope == 0.0


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_a_short_soak_loses_nothing_and_leaves_a_picture(tmp_path):
    command = [sys.executable, "-m", "chaos.soak", "--minutes", "0.15", "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = json.loads((tmp_path / "soak-sqlite.json").read_text())
    assert (figures["lost"], figures["duplicate_outcomes"]) == (0, 0)
    assert figures["faults"]["kill"] >= 1
    assert {*figures["processes"]} == {"worker", "producer", "reader"}
    ElementTree.parse(tmp_path / "soak-sqlite.svg")
