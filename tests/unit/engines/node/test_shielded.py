"""Requests that are not given up within."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aenv_ray.engines.kubernetes.client import KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.pods import Pods
from aenv_ray.engines.node.shielded import until_answered


class Slow(KubernetesClient):
    """An API that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def request(self, access: Access, name: str = "", **_: Any) -> dict[str, Any]:
        del access, name
        self.asked.set()
        await self.answers.wait()
        return {}


async def test_a_pods_creation_that_is_cancelled_ends_when_the_api_has_answered() -> None:
    """Invariant 3: removed before, the pod would come after its removal and stay."""
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


async def test_what_fails_after_it_was_given_up_is_no_failure() -> None:
    go = asyncio.Event()

    async def refused() -> None:
        await go.wait()
        raise ValueError

    asking = asyncio.create_task(until_answered(refused()))
    await asyncio.sleep(0)
    asking.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_what_is_answered_is_passed_on() -> None:
    async def refused() -> None:
        raise ValueError("no")

    assert await until_answered(asyncio.sleep(0, "yes")) == "yes"
    with pytest.raises(ValueError, match="no"):
        await until_answered(refused())
