"""A module that cannot be imported."""

raise KeyboardInterrupt("at the top")
