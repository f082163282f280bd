"""The states of services as Serve tells them."""

from __future__ import annotations

import pytest

from aenv_ray.serve.services.apps import ServiceStatus, cause_in, status_of


@pytest.mark.parametrize(
    ("application", "target", "available", "status"),
    [
        ("DEPLOYING", 2, 0, ServiceStatus.CREATING),
        ("DEPLOYING", 2, 1, ServiceStatus.UPDATING),
        ("RUNNING", 2, 2, ServiceStatus.RUNNING),
        ("RUNNING", 0, 0, ServiceStatus.PENDING),
        ("DEPLOY_FAILED", 2, 1, ServiceStatus.FAILED),
        ("UNHEALTHY", 2, 0, ServiceStatus.FAILED),
        ("DELETING", 2, 2, ServiceStatus.TERMINATED),
        ("DELETING", 0, 1, ServiceStatus.UPDATING),
    ],
)
def test_serve_statuses_map_to_aenvironments(
    application: str, target: int, available: int, status: ServiceStatus
) -> None:
    assert status_of(application, target, available) is status


def test_the_reason_is_the_cause_in_a_traceback() -> None:
    ours = "aenv_ray.errors.ConfigError: no\n\nDuring that:\naenv_ray.errors.SandboxLost: it\nwent"
    assert cause_in(f"failed 3 times.\nTraceback:\n  File x\n{ours}") == "SandboxLost: it\nwent"
    assert cause_in("a health check failed") == "a health check failed"
