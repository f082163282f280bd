"""A full disk on the command line: no more episodes begin, and replayed ones are written later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from aenv_ray.cli.sampling import rollouts
from aenv_ray.cli.sampling.replay import _rescoring
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, Sampling
from aenv_ray.sampling.replay import replay
from aenv_ray.trajectories import read
from aenv_ray.trajectories.attachments import AttachmentFiles, attachment_of
from tests.unit.trajectories.episodes import episode, step

FULL = ConfigError("run.jsonl cannot be written: No space left on device; it has 1 episodes")


class _Sampled:
    """Plays four episodes, with the failure of the output at the end of each."""

    total = 4
    playing = 0
    episodes = ()

    def __init__(self, failures: list[ConfigError | None]) -> None:
        self.output_failure: ConfigError | None = None
        self.is_draining = False
        self._failures = failures

    def __iter__(self) -> Iterator[Episode]:
        for index, failure in enumerate(self._failures):
            if self.is_draining:
                return
            self.output_failure = failure
            yield episode(index)

    def drain(self) -> None:
        self.is_draining = True

    def summary(self) -> str:
        return "summary"


@pytest.mark.parametrize(
    ("failures", "is_drained"),
    [([None, FULL, FULL, FULL], True), ([FULL, None, FULL, None], False), ([None] * 4, False)],
)
def test_no_more_episodes_begin_while_none_can_be_written(
    failures: list[ConfigError | None],
    is_drained: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process ends with its last episode, and what is in no file then is gone."""
    monkeypatch.setattr(rollouts, "_OUTPUT_PATIENCE_S", 0.0)
    run = _Sampled(failures)
    rollouts.run_all(cast("Sampling", run), quiet=True)
    assert run.is_draining is is_drained
    said = capsys.readouterr().err
    assert said.count(f"{FULL.message}; no more episodes begin") == is_drained


def test_a_replayed_episode_that_is_written_later_has_its_attachments(
    full_disk: Callable[[int | None], None], tmp_path: Path
) -> None:
    image = attachment_of(b"image", "image/png")
    before, after = tmp_path / "run.jsonl", tmp_path / "new" / "run.jsonl"
    steps = (step(attachments=[image.model_dump()]),)
    before.write_text(f"{episode(0, 0.0, steps=steps).model_dump_json()}\n")
    AttachmentFiles(before, is_directory=False).write({image.digest: b"image"})
    after.parent.mkdir()
    found = read(before)
    with _rescoring(found, replay(found, "todo@2"), after) as each:
        assert each is not None
        full_disk(1)
        each(episode(0, 1.0))
        full_disk(None)
    assert [one.reward for one in read(after)] == [1.0]
    assert read(after).attachment(image) == b"image"


def test_no_more_episodes_are_replayed_while_none_can_be_written(
    full_disk: Callable[[int | None], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is written after all lacks those that had not begun, and says so."""
    monkeypatch.setattr(rollouts, "_OUTPUT_PATIENCE_S", 0.0)
    before, after = tmp_path / "run.jsonl", tmp_path / "rescored.jsonl"
    before.write_text("".join(f"{episode(n, 0.0).model_dump_json()}\n" for n in range(3)))
    found = read(before)
    played = replay(found, "todo@2")

    def rescore() -> None:
        with _rescoring(found, played, after) as each:
            assert each is not None
            full_disk(1)
            each(episode(0, 1.0))
            assert not played.sampling.is_draining
            each(episode(1, 1.0))
            full_disk(None)
            assert played.sampling.is_draining

    with pytest.raises(ConfigError, match=r"rescored\.jsonl lacks the episodes that had not begun"):
        rescore()
    assert "rescored.jsonl cannot be written: File too large" in capsys.readouterr().err
    assert [one.reward for one in read(after)] == [1.0, 1.0]
