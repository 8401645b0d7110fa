"""The dashboard: a web application that shows a queue and lets operators act on it.

`omniq dashboard` serves it as a separate process; `create_app(queue)` returns it as an ASGI
application to mount. Every request is refused until `Access` grants it a role.

| module | what it does |
|---|---|
| `action_requests` | the parameters of the actions |
| `actions` | the actions of an operator, shared by the pages and the API |
| `alerts` | posts problems to a webhook |
| `api` | the JSON endpoints |
| `app` | builds the application: routes, sign-in, error responses |
| `app_state` | the objects that all handlers share, and a short-lived cache |
| `authentication` | secrets, one-time links and sessions |
| `authorization` | checks the role and the token of a change, and writes the audit event |
| `bulk_jobs` | changes of all tasks that a search matches |
| `charts` | SVG paths from series of numbers |
| `connections` | limits connections, and the time that a request may take to arrive |
| `cookies` | the session, and the message that the next page shows |
| `endings` | how the tasks of a list ended |
| `fleet_actions` | the actions on workers, queues, functions, limits and breakers |
| `flow_graph` | the picture of a flow |
| `flow_pages` | the pages of flows and events |
| `flow_queries` | the reads of flows that pages and API share |
| `history_pages` | the pages of functions, single queues and single workers |
| `jobs` | bulk changes in the background, and their progress |
| `live_stream` | the server-sent events of `/api/stream` |
| `middleware` | refuses unknown hosts, other sites and unauthenticated requests; security headers |
| `openapi` | the OpenAPI document |
| `operator_notes` | notes and mutes, read from the audit log |
| `operator_pages` | forms for new tasks and schedules, jobs, limits, the audit log |
| `pages` | the other HTML pages |
| `problems` | what an operator should act on |
| `queries` | query parameters, and the reads that pages and API share |
| `refused_forms` | a refused form, shown again with what was typed |
| `rendering` | templates and their filters |
| `rights` | what each role may do |
| `sampler` | snapshots of the storage, shared by all pages and streams |
| `schedule_form` | the form for a schedule, with a preview of its next times |
| `search_connection` | a second connection to the storage, for searches |
| `searches` | reads that may take long: a page shows what is there after a short time |
| `server` | runs the application with uvicorn, for `omniq dashboard` |
| `sorting` | the orders of tables |
| `waterfall` | the waits and runs of a task as bars |
| `wrong_secrets` | slows down clients that guess secrets |
"""

from omniq.dashboard.app import create_app
from omniq.dashboard.authentication import Access, Identity, Role

__all__ = ["Access", "Identity", "Role", "create_app"]
