"""How Ray's failures become ours."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from aenv_ray.actors import ray_api
from aenv_ray.errors import FabricUnavailable


@pytest.mark.parametrize(
    ("address", "words", "hint"),
    [(None, "a local Ray cannot be started", "short of"), ("h:1", "Ray at h:1", "RAY_ADDRESS")],
)
def test_a_ray_that_does_not_come_up_is_typed(
    monkeypatch: pytest.MonkeyPatch, address: str | None, words: str, hint: str
) -> None:
    """Ray raises a bare `Exception` when its processes take too long."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(FabricUnavailable, match=f"{words}.*timed out during startup") as raised:
        ray_api.ensure_ray(address)
    assert hint in str(raised.value.hint)
    assert raised.value.retryable
