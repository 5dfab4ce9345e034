"""Reaching a server over TLS, and what is said when it cannot be."""

import asyncio
import ssl
from pathlib import Path

import pytest
from aiohttp import web

from shmserve.target import Target, TargetError, served_model

TLS = Path(__file__).parent / "http" / "tls"


def asked(host: str, **fields) -> str:
    """The model of a TLS server, reached by this name of it."""

    async def models(request):
        return web.json_response({"data": [{"id": "m"}]})

    async def run() -> str:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        target = Target(f"https://{host}:{runner.addresses[0][1]}", **fields)
        try:
            async with target.session(5) as session:
                return await served_model(target, session)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_server_of_an_authority_of_ours_is_trusted_and_no_other():
    assert asked("localhost", ca_file=str(TLS / "server.pem")) == "m"
    with pytest.raises(TargetError, match="not trusted; name its authority: --ca-file"):
        asked("localhost")


def test_a_file_that_is_no_authority_is_one_line(tmp_path):
    file = tmp_path / "x.pem"
    file.write_text("nothing")
    with pytest.raises(TargetError, match="no usable PEM"):
        asked("localhost", ca_file=str(file))
    with pytest.raises(TargetError, match="No such file"):
        asked("localhost", ca_file=str(tmp_path / "none"))


def test_a_host_without_an_address_is_one_line():
    async def run() -> str:
        target = Target("http://no-such-host.invalid")
        async with target.session(5) as session:
            return await served_model(target, session)

    with pytest.raises(TargetError, match=r"^nobody answers on http://no-such-host\.invalid: "):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("key", "says"), [("", "wants a key"), ("wrong", "does not take our key"), ("right", None)]
)
def test_a_key_that_lacks_and_one_that_is_wrong_are_told_apart(key, says):
    async def models(request):
        is_good = request.headers.get("Authorization") == "Bearer right"
        return web.json_response({"data": [{"id": "m"}]}, status=200 if is_good else 401)

    async def run() -> str:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        target = Target(f"http://127.0.0.1:{runner.addresses[0][1]}", api_key=key)
        try:
            async with target.session(5) as session:
                return await served_model(target, session)
        finally:
            await runner.cleanup()

    if says is None:
        assert asyncio.run(run()) == "m"
        return
    with pytest.raises(TargetError, match=f"{says}: --api-key, or the variable SHMSERVE_API_KEY"):
        asyncio.run(run())
