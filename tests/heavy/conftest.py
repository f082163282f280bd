"""A pool of episodes of a small game, for trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tests
from aenv_ray.integrations.episodes import EpisodePool

# verl's wheel contains its own package `tests`, which hides ours.
if (ours := str(Path(__file__).parents[1])) not in tests.__path__:
    tests.__path__.insert(0, ours)

CORRIDOR = Path(__file__).parents[1] / "fixtures" / "projects" / "corridor"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[EpisodePool]:
    with EpisodePool(CORRIDOR, out=tmp_path / "episodes.jsonl") as made:
        yield made
