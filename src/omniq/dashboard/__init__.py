"""The dashboard: see the queue, and put it right. `omniq dashboard`, or a part of an ASGI app.

`create_app(queue)` gives an ASGI application. Nobody gets in until `access` says who may.
"""

from omniq.dashboard.app import create_app
from omniq.dashboard.authentication import Access, Role

__all__ = ["Access", "Role", "create_app"]
