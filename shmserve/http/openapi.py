"""/openapi.json: what this server takes, made from the schemas that its handlers read, so that it cannot be wrong about them.

Owns: the document. Ranges and rules between fields are not in it: what breaks them is answered with 400 and a text that says them.
Front end only; built once.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from shmserve import __version__
from shmserve.http.anthropic.schemas import CountRequest, MessagesRequest
from shmserve.http.native import GenerateRequest, NativeSampling
from shmserve.http.openai.responses import ResponsesRequest
from shmserve.http.openai.schemas import ChatRequest, CompletionRequest
from shmserve.http.utility import AbortRequest, DetokenizeRequest, TokenizeRequest

POSTS: Final[tuple[tuple[str, type[msgspec.Struct], str], ...]] = (
    ("/v1/chat/completions", ChatRequest, "A chat completion, whole or streamed (SSE)."),
    ("/v1/completions", CompletionRequest, "Completions of one or several prompts."),
    ("/v1/responses", ResponsesRequest, "OpenAI's Responses API, stateless."),
    ("/v1/messages", MessagesRequest, "Anthropic's Messages API."),
    ("/v1/messages/count_tokens", CountRequest, "Prompt tokens of a message."),
    ("/generate", GenerateRequest, "SGLang's native interface."),
    ("/tokenize", TokenizeRequest, "Token ids of a text or of messages."),
    ("/detokenize", DetokenizeRequest, "The text of token ids."),
    ("/abort_request", AbortRequest, "End requests by their id."),
)
GETS: Final = (
    ("/live", "200 while the event loop turns."),
    ("/health", "200 while new requests would be served."),
    ("/ready", "The same as /health."),
    ("/health_generate", "200 when a token was generated."),
    ("/metrics", "Prometheus."),
    ("/version", "The server's version."),
    ("/v1/models", "The model that is served."),
    ("/model_info", "The model, for routers."),
    ("/server_info", "Settings and state, for routers."),
    ("/v1/loads", "What each worker has to do."),
    ("/get_load", "The same, as an array."),
    ("/load", "Requests in flight."),
    ("/flush_cache", "Forget all cached prefixes."),
    ("/openapi.json", "This document."),
)
_ERRORS: Final = {
    "400": "A field is not allowed; `param` names it.",
    "404": "No such model.",
    "413": "The body is too large.",
    "503": "Nothing can be served now; Retry-After says when.",
}


def document(max_body_bytes: int) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = [schema for _, schema, _ in POSTS] + [NativeSampling]
    refs, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    components = {**components, "Error": error}
    reference = {"$ref": "#/components/schemas/Error"}
    failures = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": reference}},
        }
        for status, text in _ERRORS.items()
    }
    paths: dict[str, Any] = {}
    for (path, _, text), ref in zip(POSTS, refs, strict=False):
        paths[path] = {
            "post": {
                "summary": text,
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {
                    "required": True,
                    "description": f"At most {max_body_bytes} bytes.",
                    "content": {"application/json": {"schema": ref}},
                },
                "responses": {
                    "200": {
                        "description": "The answer.",
                        "content": {"application/json": {}, "text/event-stream": {}},
                    },
                    **failures,
                },
            }
        }
    for path, text in GETS:
        paths.setdefault(path, {})["get"] = {
            "summary": text,
            "operationId": "get_" + path.strip("/").replace("/", "_").replace(".", "_"),
            "responses": {"200": {"description": "The answer."}, "503": failures["503"]},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "shmserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
