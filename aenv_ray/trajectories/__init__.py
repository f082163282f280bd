"""Trajectories as data: the schema of episodes, their files, statistics, and exports.

from aenv_ray import trajectories

episodes = trajectories.read("run1.jsonl")
frame = episodes.to_pandas()
"""

from aenv_ray.trajectories.reading import Trajectories, read
from aenv_ray.trajectories.schema import (
    Attachment,
    Episode,
    EpisodeStatus,
    Generation,
    Step,
    Task,
    Usage,
)
from aenv_ray.trajectories.shards import ShardFormat, ShardWriter, write_manifest
from aenv_ray.trajectories.statistics import Summary, summarize

__all__ = [
    "Attachment",
    "Episode",
    "EpisodeStatus",
    "Generation",
    "ShardFormat",
    "ShardWriter",
    "Step",
    "Summary",
    "Task",
    "Trajectories",
    "Usage",
    "read",
    "summarize",
    "write_manifest",
]
