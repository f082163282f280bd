"""What hideSource hides must not be in the image either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aenv_ray.project import project
from aenv_ray.project.dockerfile import exposes_source


def written(directory: Path, dockerfile: str | None, *, hides: bool = True) -> project.Project:
    config = {"name": "p", "deployConfig": {"hideSource": hides}}
    (directory / "config.json").write_text(json.dumps(config))
    if dockerfile is not None:
        (directory / "Dockerfile").write_text(f"FROM a\n{dockerfile}\n")
    return project.load(directory)


@pytest.mark.parametrize(
    "line",
    [
        "COPY . .",
        "COPY ./ /app",
        "copy --chown=1:1 . /app",
        "ADD . /x",
        'COPY [".", "/app"]',
        "COPY requirements.txt . /app/",
        'COPY ["requirements.txt", ".", "/app/"]',
        'COPY "." /app',
        "COPY --link ./. /app",
        "COPY .. /app",
        "COPY * /app",
    ],
)
def test_a_copy_of_the_project_in_the_image_is_named(tmp_path: Path, line: str) -> None:
    found = exposes_source(written(tmp_path, f"RUN true\n{line}\nRUN true"))
    assert found is not None
    assert found.endswith(line)


@pytest.mark.parametrize("flags", ["", "--chown=1:1 "])
def test_an_instruction_may_have_several_lines(flags: str, tmp_path: Path) -> None:
    found = exposes_source(written(tmp_path, f"COPY {flags}\\\n  # all of it\n  . /app"))
    assert found is not None
    assert [*found.split()[-2:]] == [".", "/app"]


def test_a_comment_does_not_continue(tmp_path: Path) -> None:
    found = exposes_source(written(tmp_path, "# all of it: \\\nCOPY . /app"))
    assert found is not None
    assert found.endswith(": COPY . /app")


@pytest.mark.parametrize(
    "line",
    [
        "COPY requirements.txt .",
        "COPY --from=wheel . /x",
        "COPY --link \\\n --from=wheel . /x",
        "# COPY . .",
        "COPY src/lib ./lib",
        "COPY [., /app]",
        "",
    ],
)
def test_other_files_are_no_copy_of_the_project(tmp_path: Path, line: str) -> None:
    assert exposes_source(written(tmp_path, line)) is None


def test_a_project_that_hides_nothing_may_be_in_its_image(tmp_path: Path) -> None:
    assert exposes_source(written(tmp_path, None)) is None
    assert exposes_source(written(tmp_path, "COPY . .", hides=False)) is None


@pytest.mark.parametrize("name", project.builtins())
def test_images_of_built_in_environments_do_not_have_their_files(name: str) -> None:
    """D19: they contain solutions, hidden tests and graders."""
    assert exposes_source(project.load(project.builtins()[name])) is None
