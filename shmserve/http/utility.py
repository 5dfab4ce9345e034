"""What tools and routers ask a server beside generations: tokens, the model, the load.

Owns: /tokenize, /detokenize, /model_info, /server_info, /load, /get_load, /v1/loads, /health_generate, in the shapes that vLLM's and
SGLang's clients, sglang-router and vllm-router read. Numbers come from the workers' boards. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np
from aiohttp import web

from shmserve import __version__
from shmserve.http import fields
from shmserve.http.chat import chat_prompt
from shmserve.http.errors import ApiError, bad_field
from shmserve.http.front_end import FrontEnd
from shmserve.http.generation import Generation, Wanted, digest_of
from shmserve.http.health import Boards
from shmserve.http.neighbours import Neighbours
from shmserve.http.openai.schemas import ChatRequest
from shmserve.request import SamplingParams
from shmserve.wire.submit_slots import digest_of_req_id

MOST_IDS: Final = 1_000_000
INLINE_IDS: Final = 8_192
"""So few are decoded on the event loop, in some milliseconds at most."""
_OUR_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{16})")


class TokenizeRequest(msgspec.Struct):
    model: str | None = None
    prompt: str | list[str] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: bool | None = None


class AbortRequest(msgspec.Struct):
    rid: str | list[str] | None = None
    request_id: str | None = None
    request_ids: list[str] | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def tokenize(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    """Ids of a text (as /v1/completions would take it) or of messages (as chat would)."""
    parsed, _ = fields.decode(body, TokenizeRequest, {})
    front.check_model(parsed.model)
    if sum(value is not None for value in (parsed.prompt, parsed.text, parsed.messages)) != 1:
        raise bad_field("prompt", "exactly one of prompt and messages must be given")
    if parsed.messages is not None:
        chat = ChatRequest(
            messages=parsed.messages,
            add_generation_prompt=parsed.add_generation_prompt,
            continue_final_message=parsed.continue_final_message,
            chat_template=parsed.chat_template,
            chat_template_kwargs=parsed.chat_template_kwargs,
            tools=parsed.tools,
        )
        texts = [await chat_prompt(front, chat)]
        add_bos = bool(parsed.add_special_tokens)
    else:
        value = parsed.prompt if parsed.prompt is not None else parsed.text
        assert value is not None
        texts = [value] if isinstance(value, str) else value
        add_bos = parsed.add_special_tokens is None or parsed.add_special_tokens
    ids = [(await front.tokenizer.encode(text, add_bos=add_bos)).tolist() for text in texts]
    is_batch = isinstance(parsed.prompt, list)
    answer: dict[str, Any] = {
        "tokens": ids if is_batch else ids[0],
        "count": [len(each) for each in ids] if is_batch else len(ids[0]),
        "max_model_len": front.max_model_len,
        "token_strs": None,
    }
    if parsed.return_token_strs:
        names = [[front.tokenizer.name(i) for i in each] for each in ids]
        answer["token_strs"] = names if is_batch else names[0]
    return _json(answer)


async def detokenize(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    """The text of ids, special tokens included unless told otherwise."""
    parsed, _ = fields.decode(body, DetokenizeRequest, {})
    front.check_model(parsed.model)
    if len(parsed.tokens) > MOST_IDS:
        raise bad_field(
            "tokens", f"tokens may hold at most {MOST_IDS} ids, got {len(parsed.tokens)}"
        )

    def text_of() -> str:
        fields.token_ids("tokens", parsed.tokens, front.tokenizer.vocab_size)
        ids = np.array(parsed.tokens, np.int64)
        return front.tokenizer.decode(ids, skip_special_tokens=bool(parsed.skip_special_tokens))

    is_long = len(parsed.tokens) > INLINE_IDS
    text = await asyncio.to_thread(text_of) if is_long else text_of()
    return _json({"prompt": text, "text": text})


async def abort_request(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    """End requests by the id that their client gave (exactly, never by prefix), or by the id of our answer."""
    parsed, _ = fields.decode(body, AbortRequest, {})
    rids = [parsed.rid] if isinstance(parsed.rid, str) else list(parsed.rid or ())
    rids += [parsed.request_id] if parsed.request_id else []
    rids += parsed.request_ids or []
    if not rids and not parsed.abort_all:
        raise bad_field("rid", "rid must be given, or abort_all be true")
    if parsed.abort_all:
        return _json({"num_aborted": await front.client.abort_by_digest(bytes(16))})
    count = 0
    for rid in dict.fromkeys(rids):
        ours = _OUR_ID.fullmatch(rid)
        req_id = int(ours[1], 16) if ours else 0
        entry = front.client.in_flight.get(req_id)
        if entry is not None:
            front.client.end(entry)
            count += 1
            continue
        found = await front.client.abort_by_digest(digest_of(rid))
        if not found and req_id:  # it may be another front end's
            found = await front.client.abort_by_digest(digest_of_req_id(req_id))
        count += found
    return _json({"num_aborted": count})


def model_info(front: FrontEnd) -> web.Response:
    model = front.model
    return _json(
        {
            "model_path": model.spec,
            "tokenizer_path": str(model.folder),
            "is_generation": True,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.architecture,
            "architectures": [model.architecture],
            "weight_version": "default",
            "preferred_sampling_params": None,
        }
    )


def server_info(front: FrontEnd, boards: Boards) -> web.Response:
    config = front.config
    loads = [_load(front, boards, worker) for worker in sorted(front.client.links)]
    return _json(
        {
            "model_path": front.model.spec,
            "served_model_name": front.served_name,
            "tokenizer_path": str(front.model.folder),
            "version": __version__,
            "server": "shmserve",
            "tp_size": config.worker.tensor_parallel,
            "dp_size": config.num_workers,
            "num_http_processes": config.num_http,
            "io_uring": bool(front.board["io_uring"]),  # of the front end that answers
            "max_running_requests": config.worker.run_slots * config.num_workers,
            "max_queued_requests": config.http.max_queued_requests,
            "max_total_tokens": sum(load["max_total_num_tokens"] for load in loads),
            "context_length": front.max_model_len,
            "status": "draining" if front.admission.is_draining else "ready",
            "uptime_s": round(time.time() - front.started_at, 1),
        }
    )


def _load(front: FrontEnd, boards: Boards, worker: int) -> dict[str, Any]:
    reader = boards.readers.get(("worker", worker))
    words = reader.words() if reader is not None else {}
    used, total = words.get("kv_blocks_used", 0), words.get("kv_blocks_total", 0)
    size = int(front.client.links[worker].info.get("block_size", 0))
    running, waiting = words.get("running", 0), words.get("waiting", 0)
    queries, hits = words.get("prefix_query_tokens", 0), words.get("prefix_hit_tokens", 0)
    generated = words.get("generation_tokens", 0)
    rate = boards.rates.look(worker, time.monotonic_ns(), generated)
    return {
        "dp_rank": worker,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used * size,
        "max_total_num_tokens": total * size,
        "token_usage": used / total if total else 0.0,
        # Of one that has become idle, what is left of a rate says nothing: smg would take it for slow, and send it nothing.
        "gen_throughput": round(rate, 1) if running or waiting else 0.0,
        "cache_hit_rate": hits / queries if queries else 0.0,
        "utilization": running / front.config.worker.run_slots,
        "max_running_requests": front.config.worker.run_slots,
    }


def loads(front: FrontEnd, boards: Boards) -> web.Response:
    """SGLang's /v1/loads: one entry a worker. `timestamp` is a string: a router falls back to /metrics over a number."""
    entries = [_load(front, boards, worker) for worker in sorted(front.client.links)]
    return _json(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "dp_rank_count": len(entries),
            "loads": entries,
        }
    )


def get_load(front: FrontEnd, boards: Boards) -> web.Response:
    """The array that sglang-router reads."""
    entries = [_load(front, boards, worker) for worker in sorted(front.client.links)]
    return _json(
        [
            {
                "dp_rank": entry["dp_rank"],
                "num_reqs": entry["num_total_reqs"],
                "num_waiting_reqs": entry["num_waiting_reqs"],
                "num_tokens": entry["num_used_tokens"],
            }
            for entry in entries
        ]
    )


def server_load(front: FrontEnd, boards: Boards) -> web.Response:
    """vLLM's /load: sequences that all front ends have in flight."""
    others = Neighbours(front.client.http_index, boards)
    return _json({"server_load": len(front.client.in_flight) + others.num_in_flight})


async def health_generate(front: FrontEnd, request: web.Request) -> web.Response:
    """200 when a token was generated. It takes a place in the queue like anybody: use /health for a probe."""
    prompt = np.array([front.model.bos_token_id or 0], np.int32)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    async with Generation(front, request, [Wanted(prompt, params)]) as generation:
        await generation.finish()
        if not generation.entries[0].token_ids:
            raise ApiError(503, "No token came.", code="no_token")
    return web.Response(text="")
