"""What is asked of the routes of services, and what they answer."""

from __future__ import annotations

from typing import Any

import httpx

CREATE = {"envName": "probe@1.0.0", "service_name": "desk", "replicas": 2}
KEEPS = {"replicas": 1, "storage_size": "10Gi"}


async def made(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/env-service", json=CREATE | fields)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()["data"]
    return data


async def error_of(http: httpx.AsyncClient, method: str, path: str, **body: Any) -> tuple[int, str]:
    answer = await http.request(method, path, json=body or None)
    return answer.status_code, answer.json().get("error", {}).get("code", "")
