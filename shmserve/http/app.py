"""Routes, the arrival stamp, and errors as JSON.

Owns: the aiohttp application. Handlers get their body's bytes; whatever they raise becomes OpenAI's error shape, before any
byte of a response. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from shmserve import __version__
from shmserve.http import health, native, openapi, utility
from shmserve.http.anthropic import endpoints as anthropic
from shmserve.http.anthropic.formats import error_response
from shmserve.http.bodies import Bodies
from shmserve.http.connection import expect_later, in_time, log_body
from shmserve.http.deadlines import ARRIVAL
from shmserve.http.debug_stream import DebugStream
from shmserve.http.errors import ApiError
from shmserve.http.front_end import FrontEnd
from shmserve.http.metrics import InstanceCollector, render
from shmserve.http.openai import endpoints, responses
from shmserve.http.request_book import RECORD, STATUS_GONE
from shmserve.http.security import CHALLENGE, Gate
from shmserve.http.slow_client import rules_of
from shmserve.http.ui import add_page

log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 2.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BodyHandler = Callable[[FrontEnd, web.Request, bytes], Awaitable[web.StreamResponse]]


def entrance(gate: Gate, front: FrontEnd) -> Middleware:
    """What every request passes: the stamp of its arrival, the gate, and at the end the one JSON shape of errors."""
    rules = rules_of(front.config.http)

    @web.middleware
    async def enter(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[ARRIVAL] = time.monotonic_ns()
        record = front.book.begin(request) if front.book is not None else None
        if front.book is None or record is None:
            return await respond(request, handler)
        answer = None
        try:
            answer = await respond(request, handler)
            return answer
        finally:  # its client may have gone, and nothing is answered then
            front.book.ended(record, answer)

    async def respond(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refusal = gate.check(request)
            answer = refusal if refusal is not None else await handler(request)
        except Exception as error:
            if isinstance(error, ApiError) and error.status in (401, 403):
                front.board.add("num_denied")
            answer = _as_answer(request, error)
        if isinstance(answer, web.Response) and request.transport is not None:
            # It is written in this turn of the loop; who does not take it is looked at from the next on.
            name = f"{request.method} {request.path[:80]!r}"
            watch = front.slow_clients.watch_answer
            asyncio.get_running_loop().call_soon(watch, request.transport, rules, name)
        return answer

    return enter


def _as_answer(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, ConnectionError):
        # The client has gone, and nobody reads an answer; raised on, it would be an error with a traceback in the log.
        log.debug("%s %r: %s", request.method, request.path, error)
        if request.transport is not None:
            request.transport.abort()
        if RECORD in request:
            request[RECORD].status = STATUS_GONE
        return web.Response()
    api_error = _as_api_error(request, error)
    if RECORD in request:
        request[RECORD].error_code = api_error.code or api_error.type
    is_anthropic = request.path.startswith("/v1/messages")
    response = error_response(api_error) if is_anthropic else api_error.response()
    response.headers.update(endpoints.response_headers(request, None, []))
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = error.headers["Allow"]
    if api_error.status == 401:
        response.headers["WWW-Authenticate"] = CHALLENGE
    if api_error.status == 408:
        response.force_close()
    return response


def _as_api_error(request: web.Request, error: Exception) -> ApiError:
    what = f"{request.method} {request.path}"
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException) and error.status >= 400:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status)
        return ApiError(error.status, f"{error.reason}: {what}", code=code)
    if isinstance(error, web.RequestPayloadError):
        return ApiError(
            400, "The body is not framed or compressed as its headers say.", code="bad_body"
        )
    if isinstance(error, RecursionError):
        # What could be decoded may still be too deep for a walk over it. Said all the same: it may be a fault of ours.
        log.debug("%r nests too deeply", what, exc_info=error)
        return ApiError(400, "The body's JSON is nested too deeply.", code="invalid_json")
    log.error("%r failed", what, exc_info=error)
    return ApiError(500, "The server failed to handle the request.", code="internal_error")


def build(
    front: FrontEnd, boards: health.Boards, instance: str, bound: Sequence[str] = ("127.0.0.1",)
) -> web.Application:
    """The application of one front end. `bound` are the addresses that it listens on, as `security.bound_addresses` says."""
    gate = Gate(front.config.http, bound)
    app = web.Application(
        middlewares=[entrance(gate, front)],
        client_max_size=front.config.http.max_body_bytes,
    )
    if gate.allows_origins:
        app.on_response_prepare.append(gate.add_cors_headers)
    collector = InstanceCollector(instance, front.served_name, front.config)
    bodies = Bodies(front.config.http, front.board, front.admission.refused)

    def with_body(handler: BodyHandler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            front.board.add("num_requests")
            try:
                body = await in_time(request, bodies.read, front.config.http.request_timeout_s)
                if front.config.http.log_prompts:
                    log_body(request, body)
                await front.turnstile.turn(has_tokens=False)
                return await handler(front, request, body)
            except ApiError as error:
                front.board.add("num_errors")
                raise error
            finally:
                bodies.forget(request)
                front.release(request)

        return handle

    def take_body(method: str, path: str, handler: BodyHandler) -> None:
        app.router.add_route(method, path, with_body(handler), expect_handler=expect_later)

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
        return utility.server_load(front, boards)

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
    debug_stream = DebugStream(front, instance)
    app.on_shutdown.append(debug_stream.close)
    app.router.add_get("/debug/stream", debug_stream.serve, allow_head=False)
    if front.config.http.ui:
        add_page(app)
    take_body("POST", "/abort_request", utility.abort_request)
    for prefix in ("", "/v1"):
        take_body("POST", f"{prefix}/tokenize", utility.tokenize)
        take_body("POST", f"{prefix}/detokenize", utility.detokenize)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    take_body("POST", "/v1/chat/completions", endpoints.chat_completions)
    take_body("POST", "/v1/responses", responses.responses)
    take_body("POST", "/v1/messages", anthropic.messages)
    take_body("POST", "/v1/messages/count_tokens", anthropic.count_tokens)
    take_body("POST", "/v1/completions", endpoints.completions)
    take_body("POST", "/generate", native.generate)
    take_body("PUT", "/generate", native.generate)
    return app


class _OneLine(logging.Filter):
    """A request that is no HTTP is its client's fault: a debug line, not a traceback in the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            return True
        log.debug("a client sent what is no HTTP: %s", type(error).__name__)
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
        shutdown_timeout=STOP_GRACE_S,
    )


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
