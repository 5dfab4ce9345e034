"""Who may ask: the Host, the Origin and the key of a request, looked at before its body is read.

Owns: the rules below and their refusals. Never: reads a body, or holds a key (digests only). Event loop's thread only.

    Host     a page that an attacker serves under a name which he then points at our address is, for the browser, of our origin; what
             gives it away is the name. So a Host must be an address that we are bound to (any address, if bound to all), localhost, this
             machine's own name if not bound to localhost alone, or one of --allowed-hosts. Behind a Unix socket it may be anything.
    Origin   a page of another site can send us requests, whatever it may read of the answers: refused, unless --cors-origin names the
             site. Requests that a browser marks as another site's (Sec-Fetch-Site) but sends without an Origin are the same.
    key      --api-key opens everything, --admin-key the paths of ADMIN besides. Bearer or x-api-key.

/live, /health and /ready are open to everybody: probes have neither our name nor a key. The page (ui.py) needs no key, for it holds no
secret, and a link of another site may lead to it; what it asks for then passes all three.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Final

from aiohttp import web

from shmserve.config import HttpConfig
from shmserve.http.errors import ApiError
from shmserve.keys import is_among

OPEN: Final = frozenset({"/live", "/health", "/ready"})
ADMIN: Final = frozenset({"/abort_request", "/flush_cache"})
ADMIN_PREFIX: Final = "/debug/"
PAGE: Final = "/"
PAGE_FILES: Final = "/ui/{file}"
CHALLENGE: Final = 'Bearer realm="shmserve"'
PREFLIGHT_SECONDS: Final = "600"
EXPOSED: Final = "X-Request-Id, X-Shmserve-Ignored, Retry-After"
MOST_REMEMBERED: Final = 256
"""Hosts that were found good, as they were written: one set lookup a request."""

_HEADER_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:, *[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")


def bound_addresses(sockets: Iterable[socket.socket]) -> list[str]:
    """The IP addresses of listening sockets; a Unix socket has none."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [str(sock.getsockname()[0]) for sock in sockets if sock.family in families]


def warning_of(config: HttpConfig, bound: Sequence[str]) -> str:
    """What the operator should know of these settings, or ""."""
    if config.api_keys or all(ipaddress.ip_address(address).is_loopback for address in bound):
        return ""
    where = ", ".join(bound)
    return f"whoever reaches {where} may ask: there is no --api-key"


class Gate:
    """The rules of one server. `bound` are the addresses it listens on: none means Unix sockets only."""

    def __init__(self, config: HttpConfig, bound: Sequence[str]) -> None:
        self._api_keys = [bytes.fromhex(digest) for digest in config.api_keys]
        self._admin_keys = [bytes.fromhex(digest) for digest in config.admin_keys]
        self._without_key = OPEN | ({"/metrics"} if config.metrics_without_key else set())
        if config.ui:
            self._without_key |= {PAGE, PAGE_FILES}
        self._checks_host = bool(bound) and "*" not in config.allowed_hosts
        addresses = [ipaddress.ip_address(address) for address in bound]
        self._is_bound_to_all = any(address.is_unspecified for address in addresses)
        self._has_loopback = any(address.is_loopback for address in addresses)
        self._addresses = set(addresses)
        names = {"localhost"}
        if config.host and not is_address(config.host):
            names.add(config.host.lower())
        if not all(address.is_loopback for address in addresses):
            own = socket.gethostname().lower()
            names |= {own, own.partition(".")[0]}
        allowed = [
            name.strip().lower() for each in config.allowed_hosts for name in each.split(",")
        ]
        self._names = names | {name for name in allowed if not name.startswith(".")}
        self._domains = tuple(name for name in allowed if name.startswith("."))
        self._good_hosts: set[str] = set()
        origins = (origin for each in config.cors_origins for origin in each.split(","))
        self._origins = {origin.strip().lower().rstrip("/") for origin in origins}
        self.allows_origins = bool(self._origins)

    def check(self, request: web.Request) -> web.Response | None:
        """Raise ApiError (400, 401, 403) for a request that may not come in; the answer, if it is a preflight of one that may."""
        resource = request.match_info.route.resource
        place = "" if resource is None else resource.canonical
        if place in OPEN:
            return None
        headers = request.headers
        host = headers.get("Host", "")
        if self._checks_host and host not in self._good_hosts:
            self._check_host(request, host)
        is_foreign = "Origin" in headers or "Sec-Fetch-Site" in headers
        if is_foreign and not (place == PAGE and _is_navigation(request)):
            self._check_origin(request, host)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in headers:
                return self._preflight(request)
        if (self._api_keys or self._admin_keys) and place not in self._without_key:
            self._check_key(request, place)
        return None

    def _check_host(self, request: web.Request, host: str) -> None:
        if not host and request.version < (1, 1):
            return  # such clients need not send one, and no browser is among them
        if len(request.headers.getall("Host", ())) > 1:
            raise ApiError(400, "Host is there more than once.", code="invalid_host")
        if self._is_good(host):
            if len(self._good_hosts) < MOST_REMEMBERED:
                self._good_hosts.add(host)
            return
        transport = request.transport
        sock = None if transport is None else transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            return
        if not host:
            raise ApiError(400, "An HTTP/1.1 request must have a Host.", code="invalid_host")
        raise ApiError(
            403,
            f"Host {host[:100]!r} is no name of this server; --allowed-hosts makes it one.",
            type="permission_error",
            code="host_not_allowed",
        )

    def _is_good(self, host: str) -> bool:
        name = name_of(host)
        if not name:
            return False
        if not is_address(name):
            return name in self._names or name.endswith(self._domains)
        address = ipaddress.ip_address(name)
        if self._is_bound_to_all or address in self._addresses or name in self._names:
            return True
        return address.is_loopback and self._has_loopback

    def allows(self, origin: str) -> bool:
        """True if --cors-origin names this origin."""
        return "*" in self._origins or origin.lower() in self._origins

    def _check_origin(self, request: web.Request, host: str) -> None:
        origin = request.headers.get("Origin")
        if origin is None:
            if request.headers["Sec-Fetch-Site"] in ("same-origin", "none"):
                return
            origin = "(unknown)"  # the browser says that it is foreign, not which
        elif self.allows(origin) or origin.lower().partition("://")[2] == host.lower() != "":
            return
        raise ApiError(
            403,
            f"Web pages of origin {origin[:100]!r} may not ask this server; --cors-origin allows one.",
            type="permission_error",
            code="origin_not_allowed",
        )

    def _preflight(self, request: web.Request) -> web.Response:
        """204 for an origin that may ask; a key is never sent with a preflight. `add_cors_headers` names the origin."""
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, PUT, OPTIONS",
            "Access-Control-Max-Age": PREFLIGHT_SECONDS,
        }
        if _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    async def add_cors_headers(
        self, request: web.BaseRequest, response: web.StreamResponse
    ) -> None:
        """Before any response of a server with --cors-origin: whose pages may read it."""
        origin = request.headers.get("Origin")
        response.headers["Vary"] = "Origin"
        if origin is not None and self.allows(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _check_key(self, request: web.Request, place: str) -> None:
        is_admins = place in ADMIN or place.startswith(ADMIN_PREFIX)
        needs_admin = is_admins and bool(self._admin_keys)
        if not needs_admin and not self._api_keys:
            return
        sent = keys_of(request)
        if any(is_among(key, self._admin_keys) for key in sent):
            return
        is_client = any(is_among(key, self._api_keys) for key in sent)
        if is_client and not needs_admin:
            return
        if is_client:
            raise ApiError(
                403,
                f"{place} needs the operator's key (--admin-key).",
                type="permission_error",
                code="admin_key_required",
            )
        how = "Authorization: Bearer KEY, or x-api-key: KEY"
        message = f"Invalid API key. Send it as {how}." if sent else f"No API key. Send {how}."
        raise ApiError(401, message, type="authentication_error", code="invalid_api_key")


def _is_navigation(request: web.Request) -> bool:
    """True for a browser that goes to a page, as opposed to a page that asks; it can be embedded nowhere (ui.py)."""
    headers = request.headers
    return (
        headers.get("Sec-Fetch-Mode") == "navigate"
        and headers.get("Sec-Fetch-Dest") == "document"
        and "Origin" not in headers
    )


def name_of(host: str) -> str:
    """The name or address in a Host header: without the port, in lower case. "" for what is none."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") else port and "?"
        is_good = bool(bracket) and ":" in name
    else:
        name, _, port = host.partition(":")
        is_good = True
    if not is_good or (port and not port.isdecimal()):
        return ""
    return name.lower().removesuffix(".")


def is_address(name: str) -> bool:
    """True for an IP address as text."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def keys_of(request: web.Request) -> list[bytes]:
    """The keys that a request shows: OpenAI's clients send one as a bearer token, Anthropic's as x-api-key."""
    found = []
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        found.append(token.strip())
    if key := request.headers.get("x-api-key", "").strip():
        found.append(key)
    return [key.encode("utf-8", "surrogateescape") for key in found]
