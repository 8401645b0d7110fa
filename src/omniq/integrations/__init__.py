"""Integrations with frameworks and monitoring systems. omniq imports none of them by itself.

| module | what it integrates |
|---|---|
| `asgi` | a lifespan that opens the queue: Starlette and other ASGI frameworks |
| `django` | a backend for Django's tasks, and `manage.py omniq_worker` |
| `endpoint` | the HTTP endpoints of a worker: metrics, health, readiness, scaling |
| `fastapi` | the queue as a parameter of FastAPI handlers |
| `flask` | a Flask extension |
| `otel` | OpenTelemetry spans |
| `prometheus` | Prometheus metrics |
| `sentry` | a middleware that reports failed runs to Sentry |
| `sqlalchemy` | a session of SQLAlchemy for each run |
| `storage_metrics` | counts of a storage, read from any thread, for metrics and scaling |
"""
