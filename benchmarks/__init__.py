"""How fast omniq is beside its peers and beside the bare driver: `python -m benchmarks`."""
