"""Bodies of the three ways to generate, and what a refusal of one must look like."""

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": CHAT | {"max_tokens": 2},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
}
LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/generate": ("max_new_tokens",),
}
VOCAB = 49152


def with_sampling(path, **fields):
    """The body of `path` with sampling fields where it has them."""
    if path == "/generate":
        return {"text": "Hi", "sampling_params": {"max_new_tokens": 2} | fields}
    return BODIES[path] | fields


def refused(asker, path, body, status=400):
    """The error of a request that must be refused: plain, and as a stream before any 200."""
    error = None
    streams = [{}, {"stream": True}] if isinstance(body, dict) else [None]
    for more in streams:
        answer = asker.post(path, body if more is None else body | more)
        assert answer.status == status, answer.body
        error = answer.error()
        assert error["type"] == "invalid_request_error"
    return error
