"""The server that a client command speaks to: by URL or Unix socket, with its key and its certificate's authority.

Owns: the session to it, and one line for whatever is wrong with reaching it. Never: keeps a key anywhere but in the header that
carries it. Clients only: `shmserve chat`, `bench`, `demo`, and tools.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field

import aiohttp

from shmserve.stream_reading import message_of, one_line

PROBE_TIMEOUT_S = 10.0


class TargetError(RuntimeError):
    """The server cannot be spoken to; the text is one line that says which and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """`base_url` has no path. With `uds` the connection goes there, whatever the URL's host is."""

    base_url: str
    uds: str = ""
    api_key: str = field(default="", repr=False)
    ca_file: str = ""

    @property
    def name(self) -> str:
        return f"unix:{self.uds}" if self.uds else self.base_url

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/") + path

    def session(self, timeout_s: float | None) -> aiohttp.ClientSession:
        """A session without a limit on connections: one that waited for another would close an open loop. Raises TargetError."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        context: ssl.SSLContext | bool = True
        if self.ca_file:
            try:
                context = ssl.create_default_context(cafile=self.ca_file)
            except OSError as error:
                is_no_pem = isinstance(error, ssl.SSLError)  # which is an OSError too
                reason = "no usable PEM in it" if is_no_pem else error.strerror
                raise TargetError(f"--ca-file {self.ca_file} cannot be used: {reason}") from None
        connector: aiohttp.BaseConnector
        if self.uds:
            connector = aiohttp.UnixConnector(self.uds, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, ssl=context)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s and PROBE_TIMEOUT_S)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)

    def why(self, error: BaseException) -> str:
        """One line for an exception of the session."""
        if isinstance(error, TimeoutError):
            return f"{self.name} did not answer in time"
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return f"{self.name} shows a certificate that is not trusted; name its authority: --ca-file"
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno  # asyncio's own words name the call, not the reason
            reason = os.strerror(number) if number and number > 0 else error.os_error.strerror
            return f"nobody answers on {self.name}: {one_line(reason or str(error.os_error))}"
        return (
            f"the connection to {self.name} broke: {one_line(str(error)) or type(error).__name__}"
        )


async def served_model(target: Target, session: aiohttp.ClientSession) -> str:
    """The first model that the server names. Raises TargetError."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with session.get(target.url("/v1/models"), timeout=timeout) as response:
            body = await response.read()
            if response.status == 401:
                what = "does not take our key" if target.api_key else "wants a key"
                raise TargetError(
                    f"{target.name} {what}: --api-key, or the variable SHMSERVE_API_KEY or OPENAI_API_KEY"
                )
            try:
                answer = await response.json(content_type=None)
            except ValueError:
                answer = one_line(body.decode(errors="replace"), 100)
            if response.status != 200:
                raise TargetError(
                    f"{target.name} answers {response.status} to /v1/models: {message_of(answer)}"
                )
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise TargetError(target.why(error)) from None
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise TargetError(
            f"{target.name} names no model in /v1/models; say which: --model"
        ) from None
