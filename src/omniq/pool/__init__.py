"""The parts of a worker pool: its turns at the storage, its runs, its lease, its chores."""
