"""The link to the host, which the dispatchers of all tests share."""

from __future__ import annotations

import pytest

from aenv_ray.runtime.door.host.link import HOST


@pytest.fixture(autouse=True)
def unused_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests have sent: a reward would wait for a host that is not there."""
    monkeypatch.setattr(HOST, "_sent", set())
    monkeypatch.setattr(HOST, "agent_has_acted", False)
