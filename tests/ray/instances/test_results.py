"""What Ray carries back from a host."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from aenv_ray.actors.calls.wire import WireResult, decode_json
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.ray_results import write_directly
from tests.ray.cluster import Cluster

TOOL_RESULT = b'{"content":[{"type":"text","text":"\xc3\xa4"}],"isError":false}'


@ray.remote(num_cpus=0)
class _Host:
    """Returns results as a host does, and says how many it wrote by itself."""

    def __init__(self) -> None:
        context: Any = ray_api.serialization_context()
        by_ray = context.serialize
        self.left_to_ray = 0

        def counting(value: Any) -> Any:
            self.left_to_ray += isinstance(value, WireResult)
            return by_ray(value)

        context.serialize = counting
        write_directly(context, WireResult)

    async def result(self, method: str, data: bytes) -> WireResult:
        return WireResult(method, data)

    async def other(self) -> Any:
        return {"a": [1, (2, b"3"), ray_api.NAMESPACE]}, ValueError("as a value")

    async def count(self) -> int:
        return self.left_to_ray


@pytest.fixture(scope="module")
def host(cluster: Cluster) -> Any:
    del cluster
    return _Host.remote()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("tools/call", TOOL_RESULT),
        ("tools/list", b'{"tools":[]}'),
        ("aenv/function", b'{"data":null}'),
        ("aenv/function", b'{"data":"' + b"x" * 3_000_000 + b'"}'),
    ],
    ids=["tool", "list", "function", "large"],
)
def test_ray_reads_a_result_that_no_pickler_wrote(host: Any, method: str, data: bytes) -> None:
    """Small ones travel in the answer, large ones by the object store: the value is the same."""
    assert ray.get(host.result.remote(method, data), timeout=120) == decode_json(method, data)
    assert ray.get(host.count.remote(), timeout=120) == 0


def test_other_values_are_serialized_as_ever(host: Any) -> None:
    """What is no result of a call goes the way it always went."""
    value, error = ray.get(host.other.remote(), timeout=120)
    assert value == {"a": [1, (2, b"3"), "aenv"]}
    assert str(error) == "as a value"
