"""Builds the dashboard's ASGI application: routes, sign-in, static files and error responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from omniq import log
from omniq.dashboard import api, flow_pages, history_pages, operator_pages, pages
from omniq.dashboard.actions import ACTIONS
from omniq.dashboard.app_state import AppState, state_of
from omniq.dashboard.authentication import Access, Session, is_token_of
from omniq.dashboard.authorization import read_form
from omniq.dashboard.cookies import delete_cookie, set_cookie
from omniq.dashboard.live_stream import stream
from omniq.dashboard.middleware import (
    HEADERS,
    AccessMiddleware,
    client_of,
    relative_path,
    too_many_attempts,
    user_of,
)
from omniq.dashboard.openapi import document
from omniq.dashboard.rendering import accepts_gzip, compressed, environment, own_path, page
from omniq.dashboard.wrong_secrets import TooManyAttempts
from omniq.errors import (
    DuplicateTask,
    InvalidValue,
    OmniqError,
    QueueFull,
    ScheduleNotFound,
    StorageClosed,
    StorageError,
    TaskNotFound,
)
from omniq.events import Dispatcher
from omniq.queue.async_queue import AsyncTaskQueue

_STATIC = {
    "style.css": "text/css",
    "live.js": "text/javascript",
    "theme.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_CODES: dict[type[OmniqError], int] = {
    InvalidValue: 400,
    TaskNotFound: 404,
    ScheduleNotFound: 404,
    DuplicateTask: 409,
    QueueFull: 409,
    StorageClosed: 503,
    StorageError: 503,
}


def create_app(
    queue: AsyncTaskQueue, *, access: Access | None = None, events: Dispatcher | None = None
) -> Starlette:
    """The dashboard of an open queue, as an ASGI application. It can be mounted at any path.

    Without `access` it uses the secrets in OMNIQ_DASHBOARD_OPERATOR and OMNIQ_DASHBOARD_VIEWER; if
    neither is set, every request is refused. `events` receives an `OperatorActed` for every change,
    which is also logged when logging is enabled.
    """
    dispatcher = events or Dispatcher()
    log.attach(dispatcher)
    state = AppState(queue, access or Access.from_environment(), dispatcher)
    app = Starlette(
        routes=_routes(),
        middleware=[
            Middleware(
                AccessMiddleware,
                access=state.access,
                sessions=state.sessions,
                wrong_secrets=state.wrong_secrets,
            )
        ],
        exception_handlers={
            OmniqError: _error_response,
            HTTPException: _error_response,
            Exception: _internal_error,
        },
        lifespan=_lifespan,
    )
    app.state.dashboard = state
    app.state.templates = environment()
    app.state.document = document("/")
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    await app.state.dashboard.close()


def _routes() -> list[Route]:
    get = ["GET"]
    return [
        Route("/", pages.overview, methods=get),
        # Fixed paths come before paths with parameters.
        *operator_pages.ROUTES,
        Route("/tasks", pages.tasks, methods=get),
        Route("/tasks/{task_id}", pages.task, methods=get),
        Route("/dead", pages.dead, methods=get),
        Route("/workers", pages.workers, methods=get),
        Route("/schedules", pages.schedules, methods=get),
        Route("/queues", pages.queues, methods=get),
        *history_pages.ROUTES,
        *flow_pages.ROUTES,
        Route("/storage", pages.storage, methods=get),
        Route("/login", login, methods=get),
        Route("/login", sign_in, methods=["POST"]),
        Route("/logout", sign_out, methods=["POST"]),
        Route("/static/{name}", static, methods=get),
        Route("/api", pages.reference, methods=get),
        Route("/api/openapi.json", openapi, methods=get),
        Route("/api/stream", stream, methods=get),
        # Actions come before endpoints: `/api/tasks/retry` also matches `/api/tasks/{task_id}`.
        *(
            Route(f"/api/{path}", api.action_handler(each), methods=["POST"])
            for path, each in ACTIONS.items()
        ),
        *(
            Route(f"/act/{path}", pages.form_handler(each), methods=["POST"])
            for path, each in ACTIONS.items()
        ),
        *(Route(each.path, api.endpoint_handler(each), methods=get) for each in _endpoints()),
    ]


def _endpoints() -> list[api.Endpoint]:
    # Fixed paths come before paths with parameters.
    return sorted(api.ENDPOINTS, key=lambda each: "{" in each.path)


async def login(request: Request) -> Response:
    """The sign-in page. With a token of a one-time link in the query, sign in and redirect."""
    token = request.query_params.get("token")
    is_unauthenticated = bool(request.scope.get("omniq.unauthenticated"))
    if token is None or is_unauthenticated:
        return _login_page(request, 401 if is_unauthenticated else 200)
    state = state_of(request)
    session = state.sessions.redeem(token)
    if session is None:
        await state.wrong_secrets.delay(client_of(request.scope))
        return _login_page(
            request, 403, "This link was used, has expired, or a newer one has replaced it."
        )
    return _signed_in(request, session, "/")


async def sign_in(request: Request) -> Response:
    """Sign in with a secret."""
    if request.scope.get("omniq.unauthenticated"):
        return _login_page(request, 401)
    state = state_of(request)
    fields = dict(await read_form(request))
    role = state.sessions.role_of(fields.get("secret", ""))
    if role is None:
        await state.wrong_secrets.delay(client_of(request.scope))
        return _login_page(request, 403, "Wrong secret.", fields.get("next", ""))
    session = state.sessions.begin(role, fields.get("name", ""))
    return _signed_in(request, session, own_path(fields.get("next", "")))


def _signed_in(request: Request, session: Session, path: str) -> Response:
    response = RedirectResponse(f"{request.scope.get('root_path', '')}{path}", 303)
    set_cookie(response, request.scope, session)
    return response


async def sign_out(request: Request) -> Response:
    """End the session."""
    session = user_of(request).session
    if session is not None:
        if not is_token_of(session, dict(await read_form(request)).get("token", "")):
            raise HTTPException(403, "the page is out of date: reload it and repeat the action")
        state_of(request).sessions.end(session)
    response = RedirectResponse(f"{request.scope.get('root_path', '')}/login", 303)
    delete_cookie(response, request.scope)
    return response


def _login_page(request: Request, status: int, error: str = "", path: str = "") -> Response:
    access = state_of(request).access
    return page(
        request,
        "login.html",
        status,
        error=error,
        has_secrets=access.has_secrets,
        is_authorized=access.authorize is not None,
        next_path=own_path(path or request.scope.get("omniq.next", "")),
    )


async def static(request: Request) -> Response:
    """A static file. Only names in the table are served."""
    kind = _STATIC.get(request.path_params["name"])
    if kind is None:
        raise HTTPException(404, "no such file")
    content = files("omniq.dashboard").joinpath("static", request.path_params["name"]).read_bytes()
    headers = {"cache-control": "max-age=300"}
    response = Response(content, media_type=kind, headers=headers)
    return compressed(response) if accepts_gzip(request) else response


async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    return api.json_response(document(request.scope.get("root_path", "")))


async def _error_response(request: Request, error: Exception) -> Response:
    """An error as a page, or as JSON for the API."""
    if isinstance(error, TooManyAttempts):
        return too_many_attempts(error)
    if isinstance(error, HTTPException):
        code, text = error.status_code, error.detail
    else:
        code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), 400)
        text = str(error)
    path = relative_path(request.scope)
    if path.startswith("/api/"):
        return api.json_response({"error": text}, code)
    if path.startswith("/static/"):
        return PlainTextResponse(text, code)
    return page(request, "error.html", code, code=code, text=text)


async def _internal_error(request: Request, error: Exception) -> Response:
    """The response to an unexpected exception: one line, without details."""
    text = "internal error: see the log of the dashboard"
    # This response does not pass through `AccessMiddleware`, which adds the headers otherwise.
    return PlainTextResponse(text, 500, HEADERS)
