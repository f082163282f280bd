"""Rollouts at scale: many episodes over many instances."""

from aenv_ray.sampling.episode import Episode, EpisodeStatus, Step, Task, Usage
from aenv_ray.sampling.policies.scripted import RandomPolicy
from aenv_ray.sampling.sampler import Sampling, sample
from aenv_ray.sampling.summary import Summary, summarize
from aenv_ray.sampling.tasks import load_tasks

__all__ = [
    "Episode",
    "EpisodeStatus",
    "RandomPolicy",
    "Sampling",
    "Step",
    "Summary",
    "Task",
    "Usage",
    "load_tasks",
    "sample",
    "summarize",
]
