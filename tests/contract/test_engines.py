"""Every engine keeps the contract of `aenv_ray.engines.base`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.engines.fake.engine import FakeEngine
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import eventually
from tests.contract.docker.docker_node import DockerNode, docker
from tests.contract.process.node import Node
from tests.contract.runtime_contract import RuntimeContract


class TestFakeEngine(RuntimeContract):
    large_mib: ClassVar[int] = 5
    known_gaps: ClassVar[dict[str, str]] = {
        "test_variables_arguments_and_labels_reach_it": "threads share os.environ and sys.argv",
        "test_commands_see_the_same_variables": "threads share os.environ",
        "test_variables_of_the_host_do_not_reach_it": "threads share os.environ",
        "test_variables_that_code_reads_when_imported_are_its_own": "threads share os.environ",
        "test_temporary_files_are_a_sandboxs_own": "threads share /tmp",
        "test_processes_are_a_sandboxs_own": "threads see every process of the machine",
        "test_loopback_is_a_sandboxs_own": "threads share the network",
        "test_a_full_directory_is_the_tools_own_error": "nothing limits a thread's files",
        "test_a_reset_ends_what_the_agent_started": "threads share the processes of the machine",
        "test_a_change_that_cannot_be_undone_is_found": "threads share open files",
    }
    cannot_run: ClassVar[dict[str, str]] = {
        "test_a_log_has_what_was_printed": "it would wait: threads share standard output",
        "test_a_log_can_begin_with_its_last_lines": "it would wait, likewise",
        "test_a_log_that_is_followed_tells_what_comes_until_the_end": "os._exit, likewise",
        "test_a_tool_that_ends_the_runtime_is_a_lost_sandbox": "os._exit ends the whole process",
        "test_a_tool_that_opens_all_files_does_not_close_the_door": "threads share open files",
    }

    @pytest.fixture
    def make_engine(self) -> Callable[[HostId], Engine]:
        return FakeEngine

    async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None:
        assert isinstance(engine, FakeEngine)
        engine.kill(sandbox.instance_id)
        await eventually(lambda: sandbox.end_cause is not None, "its end is known")


class ProcessContract(RuntimeContract):
    """What the process engine's tests share, with and without namespaces."""

    @pytest.fixture
    def node(self) -> Node:
        raise NotImplementedError

    @pytest.fixture
    def make_engine(self, node: Node) -> Callable[[HostId], Engine]:
        self.running_node = node
        return node.engine

    async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None:
        del engine, sandbox
        self.running_node.kill_sandboxes()

    def left_over(self) -> list[str]:
        return self.running_node.left_over()


@pytest.mark.namespaces
class TestProcessEngine(ProcessContract):
    @pytest.fixture
    def node(self, walled_node: Node) -> Node:
        return walled_node


_NEVER_CLEAN = "without namespaces no instance is clean: its processes cannot be ended"


class TestProcessEngineWithoutNamespaces(ProcessContract):
    signals_look_alike: ClassVar[bool] = True
    large_mib: ClassVar[int] = 5
    known_gaps: ClassVar[dict[str, str]] = {
        "test_temporary_files_are_a_sandboxs_own": "without namespaces /tmp is the node's",
        "test_processes_are_a_sandboxs_own": "without namespaces /proc shows the whole node",
        "test_loopback_is_a_sandboxs_own": "without namespaces loopback is the node's",
        "test_a_full_directory_is_the_tools_own_error": "the work directory is on the node's disk",
        "test_a_reset_removes_what_the_agent_left": _NEVER_CLEAN,
        "test_a_reset_ends_what_the_agent_started": _NEVER_CLEAN,
        "test_an_instance_that_is_not_clean_answers_no_call": _NEVER_CLEAN,
        "test_a_call_id_of_an_earlier_episode_neither_runs_nor_answers": _NEVER_CLEAN,
        "test_a_change_that_cannot_be_undone_is_found": _NEVER_CLEAN,
    }

    @pytest.fixture
    def node(self, open_node: Node) -> Node:
        return open_node


@pytest.mark.docker
class TestDockerEngine(RuntimeContract):
    many: ClassVar[int] = 8
    starts_in_s: ClassVar[float] = 6.0

    @pytest.fixture
    def make_engine(self, docker_node: DockerNode) -> Callable[[HostId], Engine]:
        self.running_node = docker_node
        return docker_node.engine

    async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None:
        del engine
        docker("kill", self.running_node.container(sandbox.instance_id))

    def left_over(self) -> list[str]:
        return self.running_node.left_over()
