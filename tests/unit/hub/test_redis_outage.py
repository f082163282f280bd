"""A process whose hub has no Redis says so once, and once more when it is back."""

from __future__ import annotations

import pytest

from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.client import NOTICE_S, RedisOutage


def test_an_outage_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    outage, error = RedisOutage(), FabricUnavailable("Redis at redis://here does not answer")
    outage.answered(1.0)
    outage.waiting(error, 10.0, 10.0 + NOTICE_S / 2)
    assert caplog.messages == [], "a restart of the hub takes a moment"
    for begin in (10.0, 12.0):
        outage.waiting(error, begin, begin + NOTICE_S)
    outage.answered(40.0)
    outage.answered(41.0)
    first, last = caplog.messages
    assert error.message in first
    assert last == "the hub answers again after 30 s"
