"""Every engine keeps the contract of `aenv_ray.engines.base`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.engines.fake import FakeEngine
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import eventually
from aenv_ray.testing.engine_contract import EngineContract


class TestFakeEngine(EngineContract):
    known_gaps: ClassVar[dict[str, str]] = {
        "test_variables_arguments_and_labels_reach_it": "threads share os.environ and sys.argv",
        "test_commands_see_the_same_variables": "threads share os.environ",
        "test_variables_of_the_host_do_not_reach_it": "threads share os.environ",
        "test_variables_that_code_reads_when_imported_are_its_own": "threads share os.environ",
        "test_temporary_files_are_a_sandboxs_own": "threads share /tmp",
        "test_processes_are_a_sandboxs_own": "threads see every process of the machine",
        "test_loopback_is_a_sandboxs_own": "threads share the network",
        "test_a_full_directory_is_the_tools_own_error": "nothing limits a thread's files",
        "test_stop_ends_whatever_was_started[daemon]": "a daemon leaves its thread's children",
        "test_a_crash_ends_whatever_was_started": "a daemon leaves its thread's children",
    }
    cannot_run: ClassVar[dict[str, str]] = {
        "test_a_tool_that_ends_the_runtime_is_a_lost_sandbox": "os._exit ends the whole process",
    }

    @pytest.fixture
    def make_engine(self) -> Callable[[HostId], Engine]:
        return FakeEngine

    async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None:
        assert isinstance(engine, FakeEngine)
        engine.kill(sandbox.instance_id)
        await eventually(lambda: sandbox.end_cause is not None, "its end is known")
