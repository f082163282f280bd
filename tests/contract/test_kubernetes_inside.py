"""What people run inside of a cluster on Kubernetes: the built-in environment, and the doctor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aenv_ray import project
from aenv_ray.actors.fresh_sandbox import fresh_sandbox
from aenv_ray.testing.contract_bench import eventually
from tests.contract.kubernetes_node import KubernetesNode

pytestmark = pytest.mark.namespaces

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def node() -> Iterator[KubernetesNode]:
    with KubernetesNode() as node:
        yield node


async def test_a_task_of_the_built_in_terminal_is_solved_in_a_pod(node: KubernetesNode) -> None:
    """What `aenv quickstart --engine kubernetes` does, once."""
    source = project.resolve("mini-terminal")
    split = "mkdir parts && split -l 1000 -a 3 -d --additional-suffix=.log journal.log parts/part-"
    async with fresh_sandbox(source, lifetime_s=WITHIN_S, make_engine=node.engine) as sandbox:
        for method, params in (
            ("aenv/function", {"name": "start_task", "arguments": {"task_id": "split-file-30"}}),
            ("tools/call", {"name": "execute_command", "arguments": {"command": split}}),
        ):
            answer = await sandbox.request(method, params, deadline_s=WITHIN_S)
            assert not answer.get("isError"), answer
        arguments = {"arguments": {"task_id": "split-file-30"}}
        reward = await sandbox.request("aenv/reward", arguments, deadline_s=WITHIN_S)
        assert reward["data"]["score"] == 1.0
    await eventually(lambda: not node.left_over(), "nothing is left", WITHIN_S)
