"""Tensors for AReaL, whose modules are doubles: it needs CUDA. They follow version 1.0.4."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aenv_ray.integrations.episodes import Outcome
from aenv_ray.integrations.support.token_loop import Tokens
from aenv_ray.sampling import EpisodeStatus
from aenv_ray.trajectories.schema import Episode


def test_areal_gets_tensors_of_one_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, Any] = {}
    api, context = ModuleType("areal.api"), ModuleType("areal.workflow_context")
    tracker = ModuleType("areal.utils.stats_tracker")
    api.RolloutWorkflow = object  # type: ignore[attr-defined]
    context.stat_scope = lambda: "rollout"  # type: ignore[attr-defined]
    tracker.get = lambda scope: SimpleNamespace(scalar=lambda **kept: logged.update(kept))  # type: ignore[attr-defined]
    areal, utils = ModuleType("areal"), ModuleType("areal.utils")
    areal.workflow_context, utils.stats_tracker = context, tracker  # type: ignore[attr-defined]
    for module in (areal, api, context, utils, tracker):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.4")
    monkeypatch.delitem(sys.modules, "aenv_ray.integrations.areal", raising=False)
    adapter = importlib.import_module("aenv_ray.integrations.areal")
    tokens = Tokens([1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25], [7, -1, 8], turn_count=2)
    record = Episode(index=0, task_id="t", reward=0.5, status=EpisodeStatus.COMPLETED)
    found = adapter._tensors(tokens, Outcome(record))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "input_ids": [[1, 2, 3, 4, 5]],
        "logprobs": [[0.0, 0.0, -0.5, 0.0, -0.25]],
        "loss_mask": [[0, 0, 1, 0, 1]],
        "versions": [[-1, -1, 7, -1, 8]],
        "rewards": [0.5],
        "attention_mask": [[True] * 5],
    }
    assert logged == {"reward": 0.5, "num_turns": 2}
