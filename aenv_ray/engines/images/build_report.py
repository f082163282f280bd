"""What a build says: a builder's report in; steps, their words and a typed failure out.

Two builders, two reports: the daemon's own tells JSON objects, BuildKit's client lines of text
(``--progress plain``, https://docs.docker.com/reference/cli/docker/buildx/build/#progress). Nothing
here speaks with anybody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.engines.images.registry import Trouble, diagnose
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, Unauthorized

OnStep = Callable[[int, int, str], None]
"""Told the number of a step that begins, how many there are, and its text."""
OnOutput = Callable[[str], None]

_WORDS: Final = 30
"""Lines of a failing step's output that are told."""
_NOISE: Final = (" ---> ", "Removing intermediate container ", "Successfully ")
_VERTEX: Final = re.compile(r"#(\d+) (.*)")
_STEP: Final = re.compile(r"\[(?:(.*) )?(\d+)/(\d+)\] (.*)")
_OUTPUT: Final = re.compile(r"\d+\.\d+ (.*)")
_BASE_IMAGE: Final = re.compile(
    r"(?:\[internal\] load metadata for|(?:[^:]* )?\d+/\d+ : FROM) (\S+)", re.IGNORECASE
)
_HEREDOC: Final = re.compile(r"^\s*(?:RUN|COPY|ADD)\s.*<<-?[\"']?\w", re.MULTILINE | re.IGNORECASE)
_OPTION: Final = re.compile(
    r"^\s*(?:RUN|COPY|ADD)\s+(?:--\S+\s+)*(--(?:mount|network|security|link|chmod|checksum|parents"
    r"|exclude|keep-git-dir))\b",
    re.MULTILINE | re.IGNORECASE,
)


def buildkit_feature(dockerfile: str) -> str:
    """Return what of a Dockerfile only BuildKit knows; "" for nothing."""
    option = _OPTION.search(dockerfile)
    if option is not None:
        return option[1]
    return "<<" if _HEREDOC.search(dockerfile) else ""


@dataclass
class _Vertex:
    title: str
    words: list[str]


class Report:
    """How far a build is, and what its step said.

    Args:
        on_step: Told steps as they begin.
        on_output: Told what they print, line by line.
    """

    def __init__(self, on_step: OnStep, on_output: OnOutput) -> None:
        self._on_step = on_step
        self._on_output = on_output
        self.step = ""
        """The one that runs, or that failed: its number, how many there are, and its text."""
        self.words: list[str] = []
        """What it printed."""

    def failure(self, what: str, error: str) -> AenvError:
        """Return the error for a build that failed.

        Args:
            what: Failed to do what.
            error: The builder's last words.
        """
        said = "\n".join([*self.words[-_WORDS:], error.strip()])
        where = f" at step {self.step}" if self.step else ""
        message = f"{what}{where}:\n{said}"
        trouble = diagnose(error)
        if trouble is Trouble.DISK_FULL:
            hint = "free some space, for example: docker system prune"
            return FabricUnavailable(f"the disk of the Docker daemon is full: {message}", hint=hint)
        base = _BASE_IMAGE.match(self.step)
        if base is not None and trouble is Trouble.UNAUTHORIZED:
            hint = f"is {base[1]} the right name? If so: docker login, where the daemon is"
            return Unauthorized(message, hint=hint)
        if base is not None and trouble is Trouble.UNREACHABLE:
            hint = "a base image that is on this node needs no registry"
            return FabricUnavailable(message, hint=hint)
        return ConfigError(message, hint="mend that step; nothing was changed")


class PlainReport(Report):
    """The report of the daemon's own builder."""

    image_id = ""
    """Of the image, when it is built."""
    error = ""
    """Why there is none."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Take one object of the report."""
        self.error = str(line.get("error") or self.error)
        self.image_id = (line.get("aux") or {}).get("ID") or self.image_id
        for text in str(line.get("stream", "")).splitlines():
            if text.startswith("Step ") and " : " in text:
                self.step, self.words = text.removeprefix("Step "), []
                numbers, _, command = self.step.partition(" : ")
                done, _, total = numbers.partition("/")
                self._on_step(int(done), int(total), command)
            elif text.strip() and not text.startswith(_NOISE):
                self.words.append(text)
                self._on_output(text)


class BuildKitReport(Report):
    """The report of BuildKit's client.

    Steps of several stages run at once; each line says whose it is.
    """

    def __init__(self, on_step: OnStep, on_output: OnOutput) -> None:
        super().__init__(on_step, on_output)
        self._vertices: dict[str, _Vertex] = {}
        self._stages: dict[str, int] = {}
        self._begun = 0
        self._tail: list[str] = []

    def take(self, line: str) -> None:
        """Take one line of the report."""
        vertex = _VERTEX.fullmatch(line)
        if vertex is not None:
            self._take_vertex(vertex[1], vertex[2])
        elif line.strip():
            self._tail.append(line)

    @property
    def last_words(self) -> str:
        """What came at the end, outside of any step: why there is no image."""
        ends = [number for number, line in enumerate(self._tail) if not line.strip("-")]
        return "\n".join(self._tail[ends[-1] + 1 if ends else 0 :][-_WORDS:])

    def _take_vertex(self, number: str, text: str) -> None:
        vertex = self._vertices.get(number)
        if vertex is None:
            self._vertices[number] = _Vertex(self._begin(text), [])
        elif text.startswith("ERROR: "):
            self.step, self.words = vertex.title, vertex.words
        else:
            output = _OUTPUT.fullmatch(text)
            if output is not None and output[1].strip():
                vertex.words.append(output[1])
                self._on_output(output[1])

    def _begin(self, title: str) -> str:
        step = _STEP.fullmatch(title)
        if step is None:
            return title
        stage, number, total, command = step[1] or "", step[2], int(step[3]), step[4]
        self._stages[stage] = total
        self._begun += 1
        self._on_step(self._begun, max(self._begun, sum(self._stages.values())), command)
        return f"{f'{stage} ' if stage else ''}{number}/{total} : {command}"
