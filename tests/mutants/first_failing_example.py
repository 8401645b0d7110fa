"""A pytest plugin: stops at the first failing example. Shrinking it would take minutes."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("first_failing_example", phases=[Phase.generate])
settings.load_profile("first_failing_example")
