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
        "ray/test_docker.py", "ray/test_faults.py", "ray/test_life.py", "ray/test_hub.py",
        "ray/test_pools.py", "e2e/test_quickstart.py", "ray/test_cluster_faults.py",
        "ray/test_finding.py", "ray/test_sampler.py", "ray/test_sampler_leaving.py",
        "e2e/test_examples.py", "ray/test_creating.py", "ray/test_bad_input.py",
        "ray/test_handles.py", "ray/test_logs.py", "ray/test_elsewhere.py", "ray/test_quotas.py",
        "ray/test_unruly.py", "ray/test_published.py", "ray/test_results.py",
    ),
    (
        # The first three share a gateway, which ends with the last of them.
        "ray/test_services.py", "ray/test_service_storage.py", "ray/test_services_docker.py",
        "ray/test_gateway.py", "ray/test_published_client.py", "ray/test_client.py",
        "ray/test_client_sync.py", "ray/test_data_mcp.py", "ray/test_data_functions.py",
        "ray/test_data_ports.py", "ray/test_bring_up.py",
    ),
)  # fmt: skip
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
