"""Routes about the gateway itself: health, metrics, the OpenAPI document, AEnvironment's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pydantic_core
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from aenv_ray.serve.gateway import metrics
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.endpoint import Access, Asked, Endpoint

TAG: Final = "gateway"
DATA_SOURCES: Final = "data:"
"""Kind of the hub's documents of a scenario, followed by its name."""


class DataQuery(BaseModel):
    """Which instance of a data set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario: str = ""
    instance: str = ""


class HealthObject(BaseModel):
    """That the gateway answers."""

    status: str


def endpoints(
    control: Control, counted: metrics.Metrics, document: Callable[[], dict[str, Any]]
) -> list[Endpoint]:
    """Return the routes.

    Args:
        control: With the hub.
        counted: Of this replica.
        document: Makes the OpenAPI document.
    """

    async def health(asked: Asked[Any, None]) -> HealthObject:
        del asked
        return HealthObject(status="healthy")

    async def show_metrics(asked: Asked[Any, None]) -> Response:
        del asked
        return Response(counted.text(), media_type=metrics.CONTENT_TYPE)

    async def openapi(asked: Asked[Any, None]) -> Response:
        del asked
        return Response(pydantic_core.to_json(document()), media_type="application/json")

    async def data(asked: Asked[DataQuery, None]) -> dict[str, Any] | None:
        found = await control.deps.hub.documents(DATA_SOURCES + asked.query.scenario)
        return found.get(asked.query.instance)

    return [
        Endpoint("GET", "/health", health, "Whether the gateway answers", TAG, Access.PUBLIC,
                 data=HealthObject),
        Endpoint("GET", "/metrics", show_metrics, "Metrics of this replica for Prometheus", TAG,
                 Access.ADMIN, media=metrics.CONTENT_TYPE),
        Endpoint("GET", "/openapi.json", openapi, "This document", TAG, Access.PUBLIC,
                 media="application/json", is_plain=True),
        Endpoint("GET", "/data", data, "What a data set says of an instance (AEnvironment)", TAG,
                 query=DataQuery, data=dict[str, Any] | None),
    ]  # fmt: skip
