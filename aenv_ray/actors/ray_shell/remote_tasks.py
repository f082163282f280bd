"""Runs a function on a worker or on the head of the cluster, from anywhere."""

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
    """Run a function on a node that accepts instances, and return its result; blocks.

    `work` must be importable there. Nodes with `label`, a name and a value, are preferred.

    Raises:
        FabricUnavailable: Ray does not answer, the node does not exist, or the function failed.
        DeadlineExceeded: It took longer than `timeout_s`.
    """
    was_connected = ray_api.is_connected()
    ray_api.ensure_ray()
    try:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own
        node = chosen(nodes, label)
        if node is None:
            raise FabricUnavailable(
                "the cluster has no worker that accepts instances",
                hint="see the cause with aenv cluster status, or add one with aenv cluster scale 1",
            )
        task = ray_api.cheap_task(work).options(
            scheduling_strategy=ray_api.pinned(node), max_retries=0
        )
        asked = task.remote()
        try:
            result: T = ray.get(asked, timeout=timeout_s)
        except GetTimeoutError as exc:
            ray.cancel(asked)
            raise DeadlineExceeded(
                f"the worker did not answer within {timeout_s:g} s",
                hint="check the nodes with: ray status",
            ) from exc
        except RayError as exc:
            raise FabricUnavailable(f"a check on another node failed: {exc}") from exc
        return result
    finally:
        if not was_connected:
            ray_api.leave()


def on_the_head(work: Callable[..., T], *arguments: Any, what: str, timeout_s: float) -> T:
    """Run a function on Ray's head and return its result; blocks. This process is connected.

    `work` must be importable there; `what` names it in errors.

    Raises:
        FabricUnavailable: The head does not answer in time.
        AenvError: What the function raises.
    """
    task = ray_api.cheap_task(work).options(**ray_api.on_head())
    asked = task.remote(*arguments)
    result: T = ray_api.wait(asked, what, timeout_s, lambda _: None, look_s=timeout_s)
    return result


def chosen(nodes: list[dict[str, Any]], label: tuple[str, str]) -> str | None:
    """Return the id of the best node among Ray's rows; None if none accepts instances."""
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
