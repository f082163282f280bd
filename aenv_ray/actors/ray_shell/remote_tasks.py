"""Work that only a worker of the cluster can do, or only its head, asked for from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.nodes import SLOT
from aenv_ray.errors import DeadlineExceeded, FabricUnavailable

T = TypeVar("T")


def on_a_worker(work: Callable[[], T], label: tuple[str, str], timeout_s: float) -> T:
    """Return what a function returns on a node that takes instances; blocks.

    Args:
        work: Importable there.
        label: Name and value of a Ray label; nodes that have it come first.
        timeout_s: For all of it.

    Raises:
        FabricUnavailable: Ray does not answer, there is no such node, or the work failed there.
        DeadlineExceeded: It took longer.
    """
    was_connected = ray_api.is_connected()
    ray_api.ensure_ray()
    try:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own
        node = chosen(nodes, label)
        if node is None:
            raise FabricUnavailable(
                "no worker is up that takes instances",
                hint="see what it lacks with: aenv cluster status; "
                "a worker more: aenv cluster scale 1",
            )
        task = ray_api.cheap_task(work).options(
            scheduling_strategy=ray_api.pinned(node), max_retries=0
        )
        asked = task.remote()
        try:
            result: T = ray.get(asked, timeout=timeout_s)
        except GetTimeoutError as exc:
            ray.cancel(asked)
            raise DeadlineExceeded(f"a worker gave no answer in {timeout_s:g} s") from exc
        except RayError as exc:
            raise FabricUnavailable(f"a worker could not do it: {exc}") from exc
        return result
    finally:
        if not was_connected:
            ray_api.leave()


def on_the_head(work: Callable[..., T], *arguments: Any, what: str, timeout_s: float) -> T:
    """Return what a function returns on Ray's head, where this process is connected; blocks.

    Args:
        work: Importable there.
        arguments: Its own.
        what: What it does, for messages.
        timeout_s: For all of it.

    Raises:
        FabricUnavailable: The head gives no answer in time.
        AenvError: What the work raises.
    """
    task = ray_api.cheap_task(work).options(**ray_api.on_head())
    asked = task.remote(*arguments)
    result: T = ray_api.wait(asked, what, timeout_s, lambda _: None, look_s=timeout_s)
    return result


def chosen(nodes: list[dict[str, Any]], label: tuple[str, str]) -> str | None:
    """Return the id of the node to ask, of Ray's rows; None when none takes instances."""
    name, value = label
    fitting = [
        node
        for node in nodes
        if node["Alive"] and (_labels(node).get(name) == value or SLOT in node["Resources"])
    ]
    best = max(fitting, key=lambda node: _labels(node).get(name) == value, default=None)
    return None if best is None else str(best["NodeID"])


def _labels(node: Mapping[str, Any]) -> Mapping[str, str]:
    return node.get("Labels") or {}
