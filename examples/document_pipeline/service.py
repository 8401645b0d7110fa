"""A small document service on this machine that fails as configured."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import ClassVar, Self

HANGS = -1
"""In place of a status: no response until the client gives up."""


class DocumentService:
    """Accepts `POST /<document>/<action>`. Recognizes a repeated request by its `Idempotency-Key`."""

    def __init__(self) -> None:
        self.done: Counter[tuple[str, str]] = Counter()
        """How often each action took effect on each document."""
        self._failures: dict[tuple[str, str], list[tuple[int, dict[str, str]]]] = {}
        self._keys: set[str] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, document: str, action: str, status: int, times: int = 1, **headers: str) -> None:
        """Respond with the status to the next `times` requests of this action, without any effect."""
        failures = self._failures.setdefault((document, action), [])
        failures += [(status, headers)] * times

    def heal(self) -> None:
        """Stop failing."""
        self._failures.clear()

    def respond(self, document: str, action: str, key: str) -> tuple[int, dict[str, str]]:
        with self._lock:
            failures = self._failures.get((document, action))
            if failures:
                return failures.pop(0)
            if key not in self._keys:
                self._keys.add(key)
                self.done[document, action] += 1
            return 200, {}

    def hang(self) -> None:
        self._closing.wait(30)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    service: ClassVar[DocumentService]

    def do_POST(self) -> None:
        _, document, action = self.path.split("/")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.headers.get("Idempotency-Key", "")
        status, headers = self.service.respond(document, action, key)
        if status == HANGS:
            self.service.hang()
            return
        body = json.dumps({"document": document, "action": action}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the example prints the results."""
