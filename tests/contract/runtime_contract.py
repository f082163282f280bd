"""The engine contract, and what the runtime does with commands, files, results and ports.

Users' engines need only the former: in a sandbox of any engine the same runtime answers.
"""

from __future__ import annotations

from aenv_ray.testing.engine_contract import EngineContract
from tests.contract.runtime_ports import PortTests
from tests.contract.runtime_results import ResultTests
from tests.contract.runtime_workspace import WorkspaceTests


class RuntimeContract(EngineContract, WorkspaceTests, ResultTests, PortTests):
    """Tests of an engine of ours."""
