"""A completions server, as far as bench_engine.py can tell: `fake_completions.py PORT [--slow|--refuse|--one-more]`.

It counts the words of a prompt as its tokens, and answers with as many as were asked for.
"""

import asyncio
import json
import sys

from aiohttp import web

OPTIONS = ("--slow", "--refuse", "--one-more")


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake-model"}]})


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert body["model"] == "fake-model" and body["ignore_eos"]
    if "--refuse" in sys.argv:
        return web.Response(status=503)
    response = web.StreamResponse()
    await response.prepare(request)
    num_prompt_tokens = len(body["prompt"].split()) + ("--one-more" in sys.argv)
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": body["max_tokens"]}
    chunks = [{"choices": [{"text": " a"}]}] * body["max_tokens"]
    for chunk in [*chunks, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}]:
        await asyncio.sleep(0.03 if "--slow" in sys.argv else 0.002)
        await response.write(b"data: %b\n\n" % json.dumps(chunk).encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    if any(word not in OPTIONS for word in sys.argv[2:]):
        print("no such option", file=sys.stderr)
        sys.exit(3)
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
