"""A Flask extension that opens a queue.

    omniq = Omniq(app)                       # or Omniq(), and omniq.init_app(app) in a factory

    @app.post("/mails")
    def send_mail():
        return omniq.queue.enqueue(send, request.form["to"]).id

The URL is `app.config["OMNIQ_URL"]`, else that of the settings. Tasks run in `omniq worker …`.
"""

from __future__ import annotations

import atexit
import inspect
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from flask import Flask

from omniq.errors import SettingsError
from omniq.queue.blocking_queue import TaskQueue

P = ParamSpec("P")
R = TypeVar("R")


class Omniq:
    """Opens the queue when a process first uses it, and closes it when the process ends.

    Servers fork: each process has a separate queue, shared by its threads.
    """

    def __init__(self, app: Flask | None = None) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._opened: tuple[int, TaskQueue] | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Register with the application as `app.extensions["omniq"]`."""
        self._app = app
        app.config.setdefault("OMNIQ_URL", None)
        app.extensions["omniq"] = self

    @property
    def queue(self) -> TaskQueue:
        """The queue of this process."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                queue = TaskQueue(self._application.config["OMNIQ_URL"])
                queue.open()
                atexit.register(queue.close)
                self._opened = os.getpid(), queue
            return self._opened[1]

    def with_app(self, func: Callable[P, R]) -> Callable[P, R]:
        """Run the function in an application context, also in a worker. Place it below `@task`."""
        if inspect.iscoroutinefunction(func):

            @wraps(func)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._application.app_context():
                    return await func(*args, **kwargs)

            return cast("Callable[P, R]", call_async)

        @wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._application.app_context():
                return func(*args, **kwargs)

        return call

    @property
    def _application(self) -> Flask:
        if self._app is None:
            raise SettingsError("Omniq() has no application: call init_app(app) first")
        return self._app
