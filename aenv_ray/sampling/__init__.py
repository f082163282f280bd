"""Episodes at scale: many rollouts over many instances, with honest books."""

from aenv_ray.sampling.episode import Episode, EpisodeStatus, Step, Task, load_tasks
from aenv_ray.sampling.sampler import Sampling, sample
from aenv_ray.sampling.summary import Summary, summarize

__all__ = [
    "Episode",
    "EpisodeStatus",
    "Sampling",
    "Step",
    "Summary",
    "Task",
    "load_tasks",
    "sample",
    "summarize",
]
