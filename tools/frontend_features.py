"""What `bench_frontend.py --feature` adds to each request: what one request wants beside plain text, and what that costs.

Owns: the fields. Every feature still gives as many tokens as the bench asks for, and nearly as many content frames.
"""

from __future__ import annotations

from typing import Any, Final

PLAIN: Final = "plain"

_STOPS: Final = ["\n\nUser:", "</answer>", "[END OF STORY]", "Observation:"]
"""Four of the kind that clients send; a simulated model that draws among 49,152 tokens never says one of them whole."""

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

FEATURES: Final[dict[str, dict[str, Any]]] = {
    PLAIN: {},
    "stop": {"stop": _STOPS},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "ids": {"return_token_ids": True},
    "times": {"include_timing": True},
    "tools": {"tools": [_TOOL]},
    "grammar": {
        "response_format": {
            "type": "json_schema",
            # It cannot end before the tokens do: an item is two tokens at least.
            "json_schema": {
                "name": "words",
                "schema": {"type": "array", "items": {"type": "string"}, "minItems": 1_000},
            },
        }
    },
}
