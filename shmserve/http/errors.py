"""Errors as OpenAI clients expect them: a status before any byte of a stream, and one JSON shape everywhere.

    {"error": {"message", "type", "param", "code"}}

Owns: the shape, and the constructors of the refusals that several modules use. Front end only.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


class ApiError(Exception):
    """A request that is refused, or that failed. `param` names the field at fault, `retry_after_s` makes it retriable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def frame(self) -> bytes:
        """As the payload of an SSE event, for a stream that has begun."""
        return b"data: " + msgspec.json.encode(self.body()) + b"\n\n"

    def response(self) -> web.Response:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return web.Response(
            body=msgspec.json.encode(self.body()),
            status=self.status,
            content_type="application/json",
            headers=headers,
        )


def bad_field(param: str, message: str) -> ApiError:
    """400: a field's value is not allowed; `message` says the limit."""
    return ApiError(400, message, param=param, code="invalid_value")


def queue_full(
    retry_after_s: int, message: str = "The request queue is full.", status: int = 503
) -> ApiError:
    """503 (or what the operator chose) before any work is done, or when somebody better took the place."""
    return ApiError(
        status,
        message,
        type="overloaded_error",
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def aborted() -> ApiError:
    """Somebody else ended this request."""
    return ApiError(503, "The request was aborted.", code="aborted")


def worker_died(reason: str) -> ApiError:
    """The worker that computed this request is gone."""
    return ApiError(
        503,
        f"The worker process ended before the request was finished ({reason}).",
        code="worker_died",
        retry_after_s=1,
    )
