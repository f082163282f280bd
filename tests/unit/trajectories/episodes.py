"""Episodes as a run records them."""

from __future__ import annotations

from typing import Any

from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Step, Task


def step(text: str = "hello", **fields: Any) -> Step:
    given = {"tool": "echo", "arguments": {"text": "hello"}, "is_error": False, "duration_s": 0.01}
    return Step.model_validate(given | {"text": text} | fields)


def episode(index: int, reward: float | None = 1.0, **fields: Any) -> Episode:
    given: dict[str, Any] = {
        "task_id": f"t{index}",
        "task": Task(id=f"t{index}", instruction="say hello"),
        "status": EpisodeStatus.COMPLETED,
        "steps": (step(),),
        "output": "done",
        "duration_s": 0.5,
        "reward_detail": {"score": reward},
        "phases": {"policy": 0.2},
    }
    return Episode.model_validate({"index": index, "reward": reward} | given | fields)
