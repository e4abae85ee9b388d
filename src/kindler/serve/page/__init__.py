"""The web page: a few static files, and the routes that serve them.

The page gets its data from the API, with the visitor's key; the files themselves hold nothing secret and need
no key. They are kept in memory, so that no request path ever reaches the disk.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kindler.serve.endpoints import Endpoint, needs
from kindler.serve.http_errors import Problem

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from other origins, nothing inline, no framing, and no text that becomes HTML by mistake.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated each time, and mostly answered with 304
    "vary": "accept-encoding",
}


def page_routes() -> APIRouter:
    """The page at `/`, and what belongs to it below `/static/`."""
    routes = APIRouter(include_in_schema=False, route_class=Endpoint)
    files = {
        entry.name: _File(entry.read_bytes(), _TYPES[suffix])
        for entry in (resources.files(__package__) / "files").iterdir()
        if (suffix := "." + entry.name.rpartition(".")[2]) in _TYPES
    }

    @routes.get("/")
    @needs()
    async def index(request: Request) -> Response:
        return files["index.html"].reply(request)

    @routes.get("/favicon.ico")
    @needs()
    async def icon(request: Request) -> Response:
        return files["favicon.svg"].reply(request)

    @routes.get("/static/{name:path}")
    @needs()
    async def static(request: Request, name: str) -> Response:
        if name not in files:
            raise Problem(404, f"file not found: {name[:80]!r}.")
        return files[name].reply(request)

    return routes


class _File:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content, self._packed = content, gzip.compress(content, mtime=0)
        self._type = media_type
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'

    def reply(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self._etag}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self._packed, 200, {**headers, "content-encoding": "gzip"}, self._type)
        return Response(self._content, 200, headers, self._type)
