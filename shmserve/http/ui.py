"""GET / and /ui/...: the page of the server, as files of the package.

Owns: the bytes that the page is made of, read once when the process starts, and the headers that go with them. The page is the same
for everybody and holds no secret, so it needs no key; what it then asks for does. Nothing in it may run that is not one of these files:
the policy allows no inline script or style, no other origin, no frame around it, and no text that becomes HTML. Event loop only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from aiohttp import web

from shmserve.http.errors import ApiError
from shmserve.http.security import PAGE, PAGE_FILES

FOLDER: Final = Path(__file__).parent / "ui"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for anew each time, and answered 304
}


class File:
    """One file of the page."""

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._tag = hashlib.blake2b(self._body, digest_size=12).hexdigest()
        self._headers = {**HEADERS, "Content-Type": TYPES[path.suffix], "ETag": f'"{self._tag}"'}

    def response(self, request: web.Request) -> web.Response:
        known = request.if_none_match or ()
        if any(each.value in (self._tag, "*") for each in known):
            headers = {name: self._headers[name] for name in ("ETag", "Cache-Control")}
            return web.Response(status=304, headers=headers)
        return web.Response(body=self._body, headers=self._headers)


def add_page(application: web.Application) -> None:
    """Serve the page. Raises OSError if the package was installed without it."""
    files = {
        path.relative_to(FOLDER).as_posix(): File(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in TYPES
    }
    index = files.pop("index.html", None)
    if index is None:
        raise FileNotFoundError(f"{FOLDER} lacks index.html: the package is not whole")

    async def page(request: web.Request) -> web.Response:
        return index.response(request)

    async def file(request: web.Request) -> web.Response:
        found = files.get(request.match_info["file"])
        if found is None:
            raise ApiError(404, f"Not Found: GET {request.path[:200]}", code="not_found")
        return found.response(request)

    application.router.add_get(PAGE, page)
    application.router.add_get(PAGE_FILES.replace("}", ":.+}"), file)
