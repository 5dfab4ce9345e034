"""Routes, the arrival stamp, and errors as JSON.

Owns: the aiohttp application. Handlers get their body's bytes; whatever they raise becomes OpenAI's error shape, before any
byte of a response. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from shmserve import __version__
from shmserve.http import health, native, openapi, utility
from shmserve.http.anthropic import endpoints as anthropic
from shmserve.http.anthropic.formats import error_response
from shmserve.http.errors import ApiError
from shmserve.http.front_end import ARRIVAL, FrontEnd
from shmserve.http.metrics import InstanceCollector, render
from shmserve.http.openai import endpoints, responses

log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 2.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BodyHandler = Callable[[FrontEnd, web.Request, bytes], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Stamp the arrival; turn every error into the one JSON shape."""
    request[ARRIVAL] = time.monotonic_ns()
    try:
        return await handler(request)
    except ConnectionError as error:
        # The client has gone, and nobody reads an answer; raised on, it would be an error with a traceback in the log.
        log.debug("%s %s: %s", request.method, request.path, error)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    except Exception as error:
        api_error = _as_api_error(request, error)
        is_anthropic = request.path.startswith("/v1/messages")
        response = error_response(api_error) if is_anthropic else api_error.response()
        response.headers.update(endpoints.response_headers(request, None, []))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _as_api_error(request: web.Request, error: Exception) -> ApiError:
    what = f"{request.method} {request.path}"
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.client_max_size
        return ApiError(
            413, f"The body is larger than {limit} bytes (--max-body-bytes).", code="body_too_large"
        )
    if isinstance(error, web.HTTPException) and error.status >= 400:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status)
        return ApiError(error.status, f"{error.reason}: {what}", code=code)
    log.error("%s failed", what, exc_info=error)
    return ApiError(500, "The server failed to handle the request.", code="internal_error")


def build(front: FrontEnd, boards: health.Boards, instance: str) -> web.Application:
    """The application of one front end."""
    app = web.Application(
        middlewares=[errors_as_json], client_max_size=front.config.http.max_body_bytes
    )
    collector = InstanceCollector(instance, front.served_name)

    def with_body(handler: BodyHandler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            front.board.add("num_requests")
            try:
                _refuse_too_large(request)
                body = await request.read()
                await front.turnstile.turn(has_tokens=False)
                return await handler(front, request, body)
            except ApiError as error:
                front.board.add("num_errors")
                raise error

        return handle

    async def live(request: web.Request) -> web.Response:
        return health.live()

    async def ready(request: web.Request) -> web.Response:
        return health.health(front, boards)

    async def models(request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_model(front)]})

    async def model(request: web.Request) -> web.Response:
        front.check_model(request.match_info["name"])
        return _json(_model(front))

    async def metrics(request: web.Request) -> web.Response:
        text = await asyncio.to_thread(render, collector)
        return web.Response(
            body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def flush_cache(request: web.Request) -> web.Response:
        if front.client.serving() is None:
            raise front.admission.not_serving()
        await front.client.flush_cache()
        return web.Response(text="Cache flushed.\n")

    async def version(request: web.Request) -> web.Response:
        return _json({"version": __version__})

    app.router.add_get("/live", live)
    app.router.add_get("/health", ready)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)
    openapi_json = msgspec.json.encode(openapi.document(front.config.http.max_body_bytes))

    async def openapi_document(request: web.Request) -> web.Response:
        return web.Response(body=openapi_json, content_type="application/json")

    app.router.add_get("/openapi.json", openapi_document)
    app.router.add_get("/flush_cache", flush_cache)
    app.router.add_post("/flush_cache", flush_cache)

    async def model_info(request: web.Request) -> web.Response:
        return utility.model_info(front)

    async def server_info(request: web.Request) -> web.Response:
        return utility.server_info(front, boards)

    async def loads(request: web.Request) -> web.Response:
        return utility.loads(front, boards)

    async def get_load(request: web.Request) -> web.Response:
        return utility.get_load(front, boards)

    async def load(request: web.Request) -> web.Response:
        return utility.server_load(front)

    async def health_generate(request: web.Request) -> web.Response:
        return await utility.health_generate(front, request)

    app.router.add_get("/model_info", model_info)
    app.router.add_get("/get_model_info", model_info)
    app.router.add_get("/server_info", server_info)
    app.router.add_get("/get_server_info", server_info)
    app.router.add_get("/v1/loads", loads)
    app.router.add_get("/get_load", get_load)
    app.router.add_get("/load", load)
    app.router.add_get("/health_generate", health_generate)
    app.router.add_post("/abort_request", with_body(utility.abort_request))
    for prefix in ("", "/v1"):
        app.router.add_post(f"{prefix}/tokenize", with_body(utility.tokenize))
        app.router.add_post(f"{prefix}/detokenize", with_body(utility.detokenize))
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_post("/v1/chat/completions", with_body(endpoints.chat_completions))
    app.router.add_post("/v1/responses", with_body(responses.responses))
    app.router.add_post("/v1/messages", with_body(anthropic.messages))
    app.router.add_post("/v1/messages/count_tokens", with_body(anthropic.count_tokens))
    app.router.add_post("/v1/completions", with_body(endpoints.completions))
    app.router.add_post("/generate", with_body(native.generate))
    app.router.add_put("/generate", with_body(native.generate))
    return app


class _OneLine(logging.Filter):
    """A request that is no HTTP is its client's fault: a debug line, not a traceback in the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        log.debug("a client sent what is no HTTP: %s", error)
        return False


def runner_of(application: web.Application) -> web.AppRunner:
    """The runner of a front end, in production and in tests."""
    server_log = logging.getLogger("aiohttp.server")
    if not any(isinstance(each, _OneLine) for each in server_log.filters):
        server_log.addFilter(_OneLine())
    return web.AppRunner(
        application,
        handler_cancellation=True,  # else a client that leaves is noticed by nobody
        access_log=None,
        keepalive_timeout=75.0,
        shutdown_timeout=STOP_GRACE_S,
    )


def _refuse_too_large(request: web.Request) -> None:
    """413 at once, by what the header says: aiohttp would first read as much as is allowed."""
    length = request.content_length or 0
    if length > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, length)


def _model(front: FrontEnd) -> dict[str, object]:
    return {
        "id": front.served_name,
        "object": "model",
        "created": front.started_at,
        "owned_by": front.config.http.owned_by,
        "root": front.model.spec,
        "parent": None,
        "max_model_len": front.max_model_len,
    }


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
