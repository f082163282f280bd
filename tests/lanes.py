"""Which modules run one after another in one process, because their tests share a Ray.

A Ray costs four seconds of a core to start and a twentieth of one while it waits: two serve all
the tests that need none of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from xdist.scheduler import LoadScopeScheduling

TESTS: Final = Path(__file__).parent
LANES: Final = (
    (
        "ray/instances/test_docker.py",
        "ray/instances/test_faults.py",
        "ray/instances/test_life.py",
        "ray/hub/test_hub.py",
        "ray/instances/test_pools.py",
        "e2e/test_quickstart.py",
        "ray/instances/test_cluster_faults.py",
        "ray/instances/test_finding.py",
        "ray/sampling/test_sampler.py",
        "ray/sampling/test_sampler_leaving.py",
        "e2e/test_examples.py",
        "ray/instances/test_creating.py",
        "ray/instances/test_bad_input.py",
        "ray/instances/test_handles.py",
        "ray/instances/test_logs.py",
        "ray/nodes/test_remote_tasks.py",
        "ray/instances/test_quotas.py",
        "ray/instances/test_unruly.py",
        "ray/hub/test_published.py",
        "ray/instances/test_results.py",
    ),
    (
        # The first three share a gateway, which ends with the last of them.
        "ray/services/test_services.py",
        "ray/services/test_service_storage.py",
        "ray/services/test_services_docker.py",
        "ray/gateway/test_gateway.py",
        "ray/gateway/test_published_client.py",
        "ray/gateway/test_client.py",
        "ray/gateway/test_client_sync.py",
        "ray/gateway/test_data_mcp.py",
        "ray/gateway/test_data_functions.py",
        "ray/gateway/test_data_ports.py",
        "ray/gateway/test_bring_up.py",
    ),
)
"""Of about the same length; each in the order in which its modules run, long ones first."""
_PLACES: Final = {
    TESTS / name: (number, place)
    for number, lane in enumerate(LANES)
    for place, name in enumerate(lane)
}


class Lanes(LoadScopeScheduling):
    """Gives a worker a whole lane, or else a module or class."""

    def _split_scope(self, nodeid: str) -> str:
        lane = lane_of(TESTS.parent / nodeid.partition("::")[0])
        return str(super()._split_scope(nodeid)) if lane is None else f"lane {lane[0]}"


def lane_of(path: Path) -> tuple[int, int] | None:
    """Return a module's lane and its place there."""
    return _PLACES.get(path)


def check(modules: Iterable[Path]) -> None:
    """Refuse modules whose tests share a Ray and that are in no lane.

    Raises:
        ValueError: It names them. A `UsageError` of its workers xdist does not tell.
    """
    missing = [str(path.relative_to(TESTS)) for path in modules if lane_of(path) is None]
    if missing:
        raise ValueError(f"name in LANES of tests/lanes.py: {', '.join(sorted(missing))}")
