"""Work that a client does not wait for: routes for a runtime, if the server is given one.

What runs it, and where, is the runtime's business.
"""

from __future__ import annotations

from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from kindler.serve.problems import Problem

__all__ = ["Tasks", "task_routes"]

_ACTIONS = ("fit", "partial_fit", "score")


class Tasks(Protocol):
    """What runs things elsewhere. All methods may block; none is called on the event loop."""

    def submit(self, bucket: str, model: str, action: str, datax: str, datay: str | None) -> str:
        """Begin `action` of a model on stored datasets; returns the task's id."""

    def status(self, task: str) -> str:
        """ "PENDING", "RUNNING", "SUCCESS" or "FAILURE". Raises NotFoundError."""

    def result(self, task: str) -> Any:
        """What it gave, as JSON has it; raises what it raised."""


def task_routes(tasks: Tasks) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/api/v1", tags=["tasks"])

    @routes.put("/model/{name:path}/{action}", status_code=202)
    def submit(
        request: Request,
        name: str,
        action: str,
        datax: str,
        datay: str | None = None,
        bucket: str = "default",
    ) -> JSONResponse:
        """Train or score a stored model on stored datasets."""
        if action not in _ACTIONS:
            raise Problem(404, f"there is no action {action!r}; there are {', '.join(_ACTIONS)}.")
        task = tasks.submit(bucket, name, action, datax, datay)
        told = {"task_id": task, "resource_uri": request.url.path}
        return JSONResponse(told, 202, {"location": f"/api/v1/task/{task}/result"})

    @routes.get("/task/{task}/status")
    def status(task: str) -> dict[str, Any]:
        """How far a task is."""
        return {"task_id": task, "status": tasks.status(task)}

    @routes.get("/task/{task}/result")
    def result(task: str) -> dict[str, Any]:
        """What a task gave."""
        state = tasks.status(task)
        if state == "FAILURE":
            try:
                tasks.result(task)
            except Exception as exc:
                raise Problem(400, f"the task failed: {type(exc).__name__}: {exc}") from exc
        done = state == "SUCCESS"
        return {"task_id": task, "status": state, "response": tasks.result(task) if done else None}

    return routes
