"""The gateway's metrics."""

from __future__ import annotations

from aenv_ray.hub.records import Lease
from aenv_ray.serve.gateway.metrics import MAX_ENVIRONMENTS, Metrics


def test_environments_beyond_the_limit_are_counted_together() -> None:
    metrics = Metrics()
    leases = [
        Lease(
            id=f"e{n}-x", reference=f"e{n}@1", digest="d", owner="o", created_at=0.0,
            deadline=1.0, capability=f"c{n}",
        )
        for n in range(MAX_ENVIRONMENTS + 7)
    ]  # fmt: skip
    metrics.live(leases)
    text = metrics.text().decode()
    assert text.count("aenv_gateway_instances{") == MAX_ENVIRONMENTS + 1
    assert 'aenv_gateway_instances{environment="other"} 7.0' in text
    metrics.live([])
    assert 'aenv_gateway_instances{environment="e0"} 0.0' in metrics.text().decode()
