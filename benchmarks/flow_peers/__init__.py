"""Limits, debounce and batches beside peers that have them: `python -m benchmarks.flow_peers`.

| module | what is in it |
|---|---|
| `__main__` | runs each figure in pairs on one Redis server, and prints ratios |
| `meter` | the protocol of a side: fill, drain, and one line of JSON |
| `omniq_side` | omniq: `max_running` for each key, `on_conflict="replace"` with `delay`, `@batched` |
| `docket_side` | docket: `ConcurrencyLimit` for each key, `Debounce` |
| `celery_side` | celery-batches: `Batches` with `flush_every` |
"""
