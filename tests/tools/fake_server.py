"""A supervisor with one front end, as far as bench_frontend.py can tell: `fake_server.py PORT [--orphan]`.

The front end is this file again, with words in its command line that the bench looks for. With --orphan the supervisor
leaves it behind.
"""

import json
import os
import signal
import subprocess
import sys

from aiohttp import web

TEXTS = ["", " a", " longer", " bb", ""]


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake-model"}]})


async def chat(request: web.Request) -> web.StreamResponse:
    assert (await request.json())["model"] == "fake-model"
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    for text in TEXTS:
        event = {"id": "chatcmpl-00000000000000ff", "choices": [{"delta": {"content": text}}]}
        await response.write(b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def health(request: web.Request) -> web.Response:
    return web.Response()


def serve(port: int) -> None:
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=False)


def main() -> None:
    port, leaves_orphan = sys.argv[1], "--orphan" in sys.argv
    if "shmserve.http" in sys.argv:
        serve(int(port))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = subprocess.Popen([sys.executable, __file__, port, "-m", "shmserve.http"])
    signal.sigwait({signal.SIGTERM})
    if not leaves_orphan:
        child.kill()
        child.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
