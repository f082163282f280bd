"""Reading trajectories: one file or a directory of shards, as episodes, pandas, Ray or datasets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories import arrow, shards
from aenv_ray.trajectories.attachments import AttachmentFiles
from aenv_ray.trajectories.files import of_another_run, read_lines
from aenv_ray.trajectories.schema import Attachment, Episode, EpisodeStatus, Task

if TYPE_CHECKING:
    import datasets
    import pandas
    import pyarrow
    import ray.data

logger = logging.getLogger("aenv_ray")


class Trajectories:
    """Recorded episodes, in order of their index.

    Args:
        episodes: The recorded episodes. If several have the same index, the last one is kept, but
            no infrastructure failure in place of a finished one: a resumed run plays failed
            episodes again.
        torn: Files whose last line is incomplete, for example because their writer was killed.
        attachments: Where the attachments are; None if there are none.
    """

    def __init__(
        self,
        episodes: Iterable[Episode],
        torn: Iterable[Path] = (),
        attachments: AttachmentFiles | None = None,
    ) -> None:
        self._attachments = attachments
        kept: dict[int, Episode] = {}
        for episode in episodes:
            earlier = kept.get(episode.index)
            is_finished = earlier is not None and earlier.status is not EpisodeStatus.INFRA_FAILED
            if episode.status is not EpisodeStatus.INFRA_FAILED or not is_finished:
                kept[episode.index] = episode
        self._episodes = [kept[index] for index in sorted(kept)]
        self.torn = tuple(torn)
        """Files whose last line is incomplete; the episode of that line is missing."""

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes)

    def __len__(self) -> int:
        return len(self._episodes)

    def __getitem__(self, position: int) -> Episode:
        return self._episodes[position]

    def attachment(self, attachment: Attachment | str) -> bytes:
        """Return the content of an attachment of an episode, given the attachment or its digest.

        Raises:
            ConfigError: It is missing, or has changed.
        """
        digest = attachment if isinstance(attachment, str) else attachment.digest
        if self._attachments is None:
            raise ConfigError(
                f"there is no content of {digest}: these episodes were not read from an output",
                hint="use aenv_ray.trajectories.read(PATH)",
            )
        return self._attachments.read(digest)

    def to_arrow(self) -> pyarrow.Table:
        """Return a column per field, with free-form values as JSON text.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        return arrow.to_table(self._episodes)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row per episode; nested values stay Python objects.

        Raises:
            ConfigError: pandas is not installed.
        """
        frame = arrow.optional("pandas", "to_pandas()", "data").DataFrame
        rows = [episode.model_dump(mode="json") for episode in self]
        return frame(rows, columns=list(Episode.model_fields))

    def to_ray(self) -> ray.data.Dataset:
        """Return the columns of `to_arrow` as a data set of Ray Data.

        Raises:
            ConfigError: Ray Data cannot be imported.
        """
        from aenv_ray.actors.ray_shell import ray_api

        return ray_api.dataset_of(self.to_arrow())

    def to_datasets(self) -> datasets.Dataset:
        """Return the columns of `to_arrow` as a data set of Hugging Face.

        Raises:
            ConfigError: datasets is not installed.
        """
        return arrow.optional("datasets", "to_datasets()", "data").Dataset(self.to_arrow())


def read(path: str | Path, *, renumber: bool = False) -> Trajectories:
    """Read recorded episodes.

    A torn last line, which a killed writer leaves, is skipped with a warning.

    Args:
        path: A JSON Lines file, a Parquet file, or a directory of shards.
        renumber: Whether finished episodes whose index an earlier one has, as in files that were
            joined, get new indices above the others.

    Raises:
        ConfigError: It is missing, cannot be read, or holds something else; a listed shard is
            missing; several finished episodes have the same index, and `renumber` is false; or the
            records are of a newer version of the schema.
    """
    source = Path(path)
    if source.is_dir():
        shards.check_manifest(source)
        files = shards.shard_files(source)
    else:
        files = [source]
    episodes: list[Episode] = []
    repeated: list[Episode] = []
    torn: list[Path] = []
    first: dict[int, tuple[str, Path]] = {}
    for file in files:
        if file.suffix == ".parquet":
            found = arrow.read_parquet(file)
        else:
            lines = read_lines(file)
            found = lines.episodes
            if lines.is_torn:
                torn.append(file)
                logger.warning("%s: the last line is incomplete and is skipped", file)
        for episode in found:
            if episode.status is EpisodeStatus.INFRA_FAILED or episode.index not in first:
                episodes.append(episode)
            elif renumber:
                repeated.append(episode)
            else:
                raise _repeated(source, file, episode, *first[episode.index])
            if episode.status is not EpisodeStatus.INFRA_FAILED:
                first.setdefault(episode.index, (episode.task_id, file))
    following = max((one.index for one in episodes), default=-1) + 1
    episodes += [
        one.model_copy(update={"index": index}) for index, one in enumerate(repeated, following)
    ]
    attachments = AttachmentFiles(source, is_directory=source.is_dir())
    return Trajectories(episodes, torn, attachments)


def _repeated(
    source: Path, file: Path, episode: Episode, first_task: str, first_file: Path
) -> ConfigError:
    """Return the error for an episode that would hide another finished one of its index."""
    where = "it" if file == first_file else str(first_file)
    return ConfigError(
        f"{file} has an episode {episode.index} of task {episode.task_id!r}, and so has {where} of "
        f"task {first_task!r}",
        hint="give the episodes of one output different indices; number these anew: "
        f"aenv trajectories filter {source} --out NEW.jsonl",
    )


def finished_episodes(path: Path, tasks: Sequence[Task] | None) -> list[Episode]:
    """Return the episodes of an interrupted run that need not run again.

    Episodes with infrastructure failures run again. An incomplete last line is ignored.

    Args:
        path: The run's output, a file or a directory of shards; it may be missing.
        tasks: The tasks of the run. None if they are not known yet; `TaskFeed.skip` compares them.

    Raises:
        ConfigError: The output cannot be read, or belongs to other tasks.
    """
    found: dict[int, Episode] = {}
    for where, episode in _located(path):
        if not _is_of(episode, tasks):
            raise of_another_run(where, episode.index, episode.task_id)
        if episode.status is not EpisodeStatus.INFRA_FAILED:
            found[episode.index] = episode
    return list(found.values())


def _located(path: Path) -> Iterator[tuple[str, Episode]]:
    """Yield the episodes of an output with the file and line that each is in."""
    if path.is_dir():
        for file in shards.shard_files(path):
            yield from ((str(file), episode) for episode in shards.load_shard(file))
    elif path.exists():
        for number, episode in read_lines(path).numbered:
            yield f"{path}, line {number}", episode


def _is_of(episode: Episode, tasks: Sequence[Task] | None) -> bool:
    index = episode.index
    if tasks is None:
        return index >= 0
    return 0 <= index < len(tasks) and tasks[index].id == episode.task_id
