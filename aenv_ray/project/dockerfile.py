"""What a project's Dockerfile puts into the image."""

from __future__ import annotations

import re
from typing import Final

from aenv_ray.project.project import Project

_COPIES_CONTEXT: Final = re.compile(
    r"""^[^\S\n]*+(?:COPY|ADD)\s++(?!.*--from=)(?:--\S++\s++)*(?:\[\s*"\.?/?"|\.?/?(?=\s))""",
    re.IGNORECASE | re.MULTILINE,
)
EXPOSED_HINT: Final = (
    "copy only what the code needs besides its own files, which are mounted, such as "
    "requirements.txt"
)


def exposes_source(project: Project) -> str | None:
    """Return why agents can read files that `hideSource` hides; None if the image has none of them.

    The engines hide the mounted project, and do not know which files of an image are copies of it.
    """
    if not project.config.deploy.hide_source:
        return None
    name = project.config.build.dockerfile
    try:
        text = (project.path / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # the project has none
    copied = _COPIES_CONTEXT.search(text)
    if copied is None:
        return None
    line = text[copied.start() :].strip().partition("\n")[0]
    return f"{name} copies the project into the image, where hideSource does not hide it: {line}"
