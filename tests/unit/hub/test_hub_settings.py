"""The hub's settings, which Ray keeps pickled with the actor."""

from __future__ import annotations

import pickle
from pathlib import Path

from aenv_ray.hub.hub_actor import HubSettings


def test_settings_that_an_earlier_version_pickled_get_the_defaults_of_newer_fields() -> None:
    """Ray restarts the hub with them after an upgrade of the head."""
    settings = HubSettings(prefix="other", data_dir=Path("/d"), runtime_dir=Path("/r"))
    state = settings.__getstate__()
    del state["__dict__"]["redis_password"]
    earlier = HubSettings.__new__(HubSettings)
    earlier.__setstate__(state)
    assert earlier == settings
    assert pickle.loads(pickle.dumps(settings)) == settings
