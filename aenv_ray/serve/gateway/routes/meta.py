"""Control routes of the gateway itself: health, metrics, OpenAPI; and AEnvironment's ``/data``."""

from __future__ import annotations

from typing import Annotated, Any, Final

import pydantic_core
from fastapi import Query
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from aenv_ray.serve.gateway.routes.routing import AdminCall, PublicCall, UserCall, control_router
from aenv_ray.serve.gateway.routes.schemas import NoQuery

router = control_router("gateway")
DATA_SOURCES: Final = "data:"
"""``/data`` reads the hub's documents of kind ``data:SCENARIO``; this is the prefix."""


class DataQuery(NoQuery):
    """Selects an entry of a data set: the scenario names the data set, the instance the entry."""

    scenario: str = ""
    instance: str = ""


class HealthObject(BaseModel):
    """The gateway's own health."""

    status: str


@router.get("/health")
async def health() -> HealthObject:
    """Report that the gateway answers."""
    return HealthObject(status="healthy")


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(call: AdminCall) -> Response:
    """Show the metrics of this replica in Prometheus format."""
    return PlainTextResponse(call.control.metrics.text())


@router.get("/openapi.json", response_model=dict[str, Any])
async def openapi(call: PublicCall) -> Response:
    """Show this document."""
    document = call.request.app.openapi()
    return Response(pydantic_core.to_json(document), media_type="application/json")


@router.get("/data")
async def data(call: UserCall, query: Annotated[DataQuery, Query()]) -> dict[str, Any] | None:
    """Show an entry of a data set (AEnvironment)."""
    entries = await call.hub.documents(DATA_SOURCES + query.scenario)
    return entries.get(query.instance)
