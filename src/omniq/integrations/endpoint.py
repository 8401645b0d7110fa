"""The pages of a worker for those who watch it: Prometheus, Kubernetes, an autoscaler.

| path | |
|---|---|
| `/metrics` | all numbers, for Prometheus |
| `/health` | 200 while the process is there: restart it when this does not answer |
| `/ready` | 200 while it claims tasks and the storage answers, else 503 and why |
| `/scale` | `oldest_due_age` in seconds and `waiting` tasks as JSON, for an autoscaler |
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from omniq.errors import OmniqError, SettingsError
from omniq.integrations.storage_metrics import Figures
from omniq.models import TaskStatus
from omniq.worker.process.supervisor import Worker

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_TEXT = "text/plain; charset=utf-8"

Answer = tuple[int, str, bytes]


@contextmanager
def watched(worker: Worker, host: str, port: int) -> Iterator[int]:
    """Serve the pages about a worker, whose listeners include `prometheus.Counters`; the port.

    Enter it before the worker runs. Where it has several processes, they count in files that
    `prometheus_client` adds up, in a folder that is removed in the end.
    """
    with _folder(worker.processes), Figures(worker.storage) as figures:
        pages = _pages(worker, figures)
        try:
            server = _Server((host, port), _handler(pages))
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        thread = threading.Thread(target=server.serve_forever, name="omniq-metrics", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _pages(worker: Worker, figures: Figures) -> dict[str, Callable[[], Answer]]:
    try:
        # Not before the folder is known: it decides on being imported where it counts.
        from prometheus_client import (
            CONTENT_TYPE_LATEST,
            REGISTRY,
            CollectorRegistry,
            exposition,
            multiprocess,
        )
    except ModuleNotFoundError as error:
        raise SettingsError("metrics need more: pip install 'omniq[prometheus]'") from error
    from omniq.integrations.prometheus import StoreFigures

    own = CollectorRegistry()
    own.register(StoreFigures(figures))
    if worker.processes > 1:
        multiprocess.MultiProcessCollector(own)  # type: ignore[no-untyped-call]

    def metrics() -> Answer:
        text = exposition.generate_latest(own)
        if worker.processes == 1:
            text += exposition.generate_latest(REGISTRY)
        return 200, CONTENT_TYPE_LATEST, text

    def ready() -> Answer:
        if not worker.is_ready:
            return 503, _TEXT, b"no tasks are claimed: starting, or stopping\n"
        try:
            figures.read()
        except OmniqError as error:
            return 503, _TEXT, f"{error}\n".encode()
        return 200, _TEXT, b"ready\n"

    def scale() -> Answer:
        try:
            stats, workers = figures.read()
        except OmniqError as error:
            return 503, _TEXT, f"{error}\n".encode()
        waiting = stats.by_status[TaskStatus.PENDING] + stats.by_status[TaskStatus.RETRYING]
        told = {
            "oldest_due_age": round(stats.oldest_due_age, 3),
            "waiting": waiting,
            "workers": len(workers),
        }
        return 200, "application/json", json.dumps(told).encode()

    return {
        "/metrics": metrics,
        "/health": lambda: (200, _TEXT, b"ok\n"),
        "/ready": ready,
        "/scale": scale,
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


def _handler(pages: dict[str, Callable[[], Answer]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0
        """Seconds that a client may take to say what it wants."""

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, kind, body = page() if page else (404, _TEXT, b"no such page\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "omniq"

        def log_message(self, *args: object) -> None:
            """A scrape every few seconds is nothing to be told of."""

    return Handler


@contextmanager
def _folder(processes: int) -> Iterator[None]:
    """Where several processes count, if there are several and nobody has named a place."""
    if processes == 1 or os.environ.get(_FOLDER):
        yield
        return
    folder = tempfile.mkdtemp(prefix="omniq-metrics-")
    os.environ[_FOLDER] = folder
    try:
        yield
    finally:
        del os.environ[_FOLDER]
        shutil.rmtree(folder, ignore_errors=True)
