"""What all FastAPI endpoints share: what they require, checked before their body is read; and its limits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request, Security
from fastapi.responses import Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from kindler.serve.auth import Access
from kindler.serve.bodies import Receive
from kindler.serve.http_errors import Problem
from kindler.serve.protocols.values import dumps
from kindler.serve.request_log import Entry

# Where the app keeps what the endpoints need of a request.
ENTRY, ACCESS = "kindler.entry", "kindler.access"
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a request needs.

    Attributes:
        scopes: Any one of these; empty if no key is needed.
        shelf: The shelf of the name in its path; None if it has none.
        filtered: The endpoint itself leaves out what a key does not cover. A key for some buckets or names
            opens only endpoints that have a shelf or are filtered.
        most_bytes: The largest body, if that is less than the server's limit.
    """

    scopes: tuple[str, ...]
    shelf: str | None = None
    filtered: bool = False
    most_bytes: int | None = None


UNDECLARED = Requirement(("admin",))


def needs(
    *scopes: str, on: str | None = None, filtered: bool = False, most_bytes: int | None = None
) -> Callable[[_Endpoint], _Endpoint]:
    """Declare what an endpoint requires: see `Requirement`."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.kindler_needs = Requirement(scopes, on, filtered, most_bytes)  # type: ignore[attr-defined]
        return endpoint

    return mark


class Json(Response):
    """JSON that may hold arrays."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content, tokens=False)


# `async`: FastAPI would take a thread for each call of a plain function.
async def _access(
    request: Request,
    bucket: Annotated[str | None, Query(description="Bucket of the store")] = None,
    bearer: Any = Security(HTTPBearer(auto_error=False, scheme_name="bearer")),  # noqa: B008 - FastAPI's way
) -> Access:
    access: Access = request.scope[ACCESS]  # that of the authorization, and no other
    return access


Authorized = Annotated[Access, Depends(_access)]


class Endpoint(APIRoute):
    """A route that authorizes a request by what its endpoint `needs`, and only then reads the body.

    FastAPI's own dependencies would run after the body was read, whoever sent it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        requirement = getattr(self.endpoint, "kindler_needs", UNDECLARED)

        async def authorized(request: Request) -> Response:
            entry: Entry = request.scope[ENTRY]
            bodies = request.app.state.predictions.bodies
            entry.counted = True  # if it is refused
            request.scope[ACCESS] = await authorize(request, requirement)
            is_get = request.method == "GET"
            body: bytes = b"" if is_get else await bodies.read(request.receive, request.headers)
            entry.counted, entry.bytes_in = False, len(body)
            try:
                if requirement.most_bytes is not None and len(body) > requirement.most_bytes:
                    limit = f"at most {requirement.most_bytes} are allowed"
                    raise Problem(413, f"the body has {len(body)} bytes; {limit}.")
                return await handle(Request(request.scope, _replay(body, request.receive)))
            finally:
                bodies.release(body)

        return authorized


async def authorize(request: Request, requirement: Requirement) -> Access:
    name = request.path_params.get("name") if requirement.shelf else None
    access: Access = await request.app.state.predictions.authorizer.authorize(
        request.scope[ENTRY],
        request.headers,
        request.query_params.get("bucket"),
        requirement.scopes,
        limited=requirement.filtered or bool(name),
    )
    if requirement.shelf and name:
        access.check(requirement.shelf, name)
    return access


def _replay(body: bytes, receive: Receive) -> Receive:
    """The messages of a request whose body was read already."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return again
