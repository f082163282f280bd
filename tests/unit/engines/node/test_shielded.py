"""Create requests that outlive the cancellation of their caller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aenv_ray.engines.kubernetes.client import KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.pods import Pods
from aenv_ray.engines.node.shielded import shielded


class Slow(KubernetesClient):
    """An API that answers when the test says so."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def request(self, access: Access, name: str = "", **_: Any) -> dict[str, Any]:
        del access, name
        self.asked.set()
        await self.answers.wait()
        return {}


async def test_a_cancelled_pod_creation_waits_for_the_answer() -> None:
    """Invariant 3: otherwise the API could create the pod after its deletion."""
    client = Slow()
    creating = asyncio.create_task(Pods(client, "", lambda *_: None).create({}))
    await client.asked.wait()
    creating.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not creating.done()
    client.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await creating


async def test_an_error_after_the_cancellation_is_not_logged_as_unhandled() -> None:
    go = asyncio.Event()

    async def refused() -> None:
        await go.wait()
        raise ValueError

    asking = asyncio.create_task(shielded(refused()))
    await asyncio.sleep(0)
    asking.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_results_and_errors_are_passed_on() -> None:
    async def refused() -> None:
        raise ValueError("no")

    assert await shielded(asyncio.sleep(0, "yes")) == "yes"
    with pytest.raises(ValueError, match="no"):
        await shielded(refused())
