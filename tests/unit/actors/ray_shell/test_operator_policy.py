"""The operator's policy, as processes read it from Ray."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from aenv_ray.actors.ray_shell import operator_policy, ray_api
from aenv_ray.actors.ray_shell.operator_policy import _Reader
from aenv_ray.errors import FabricUnavailable
from aenv_ray.policy import STRICT, Policy

HANGS = """
import threading
from aenv_ray.actors.ray_shell import operator_policy, ray_api
asked = threading.Event()
def load(key):
    asked.set()
    threading.Event().wait()
ray_api.stored_value = load
operator_policy._FIRST_S = 0.0
try:
    operator_policy.current()
except Exception as exc:
    print(type(exc).__name__)
asked.wait()
"""


def test_a_program_ends_while_rays_head_does_not_answer() -> None:
    """Ctrl-C in a sampling whose head is lost would otherwise wait for the head."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "FabricUnavailable\n"), done.stderr


def test_the_last_known_policy_holds_while_ray_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator_policy, "_PATIENCE_S", 0.0)
    stored, is_away, back = [STRICT.model_dump_json()], threading.Event(), threading.Event()

    def load(key: str) -> str:
        if is_away.is_set():
            back.wait()
        return stored[0]

    monkeypatch.setattr(ray_api, "stored_value", load)
    reader = _Reader()
    assert reader.current() == STRICT
    reader.forget()
    is_away.set()
    stored[0] = Policy().model_dump_json()
    assert reader.current() == STRICT
    reading = reader._reading
    assert reading is not None
    back.set()
    reading.result(60)
    assert reader.current() == Policy()


def test_a_policy_that_was_never_known_is_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(key: str) -> str:
        raise FabricUnavailable("Ray does not answer")

    monkeypatch.setattr(ray_api, "stored_value", load)
    with pytest.raises(FabricUnavailable):
        _Reader().current()
