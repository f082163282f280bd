"""What the agent left where installers look, and what is hidden until pytest runs.

Test scripts install pytest before they run it. What uv finds in the working directory decides
which Python and which pytest that is; package managers run programs of the search path. So these
files are as the image has them until pytest starts. Then the agent's are put back: they may be what
is tested.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator

import fingerprints
import package_managers

OF_UV = (*("pyproject.toml", "uv.lock", "uv.toml", ".python-version", ".python-versions", ".venv"),)
"""What uv reads in the working directory and in those above it."""
_BRINGS_PYTEST = re.compile(r"\buvx\b|\buv (?:add|init|pip|tool|venv)\b|--with\b")
"""A script with uv that does not rely on a project for pytest."""
_USES_PROJECT = re.compile(
    r"\buv (?:build|export|lock|sync)\b|\bpyproject\.toml\b"
    r"|\binstall\b[^\n;&|]*\s(?:-e\s*)?['\"]?\.(?:/|\[|['\"\s;&|]|$)"
    r"|\buv run\b(?![^\n;&|]*(?:\bpytest\b|/tests/|TEST_DIR))",
    re.MULTILINE,
)
"""A script that runs code of the project before pytest, as it is meant to."""
_VENV = re.compile(r"(?:\buv venv|-m venv|\bvirtualenv)\b([^\n;&|]*)")


def save(directory: str) -> package_managers.Saved:
    """Return what uv would find in a directory and in those above it."""
    found: package_managers.Saved = {}
    for path in _places(directory):
        found.update(package_managers.entry(path))
    return found


def found_by_uv(script: str, directory: str, before: package_managers.Saved) -> list[str]:
    """Return what the agent added or changed of what uv would find when it runs in a script."""
    if not _BRINGS_PYTEST.search(script) or _USES_PROJECT.search(script):
        return []
    now = ((path, package_managers.entry(path).get(path)) for path in _places(directory))
    return [path for path, one in now if one is not None and one != before.get(path)]


def made_by_script(script: str, directory: str, since: int) -> list[str]:
    """Return what the agent has put where a script makes a virtual environment."""
    words = {word.strip("'\"") for match in _VENV.findall(script) for word in match.split()}
    paths = {os.path.normpath(os.path.join(directory, one)) for one in words if one[:1] != "-"}
    return sorted(one for one in paths if one != directory and _is_of_agent(one, since))


def _is_of_agent(path: str, since: int) -> bool:
    given = (path, os.path.join(path, "bin"), os.path.join(path, "bin", "activate"))
    return any(fingerprints.is_newer(one, since) for one in given)


def _places(directory: str) -> Iterator[str]:
    place = os.path.abspath(directory or "/")
    while True:
        yield from (os.path.join(place, name) for name in OF_UV)
        if place == os.path.dirname(place):
            return
        place = os.path.dirname(place)


class Hidden:
    """Files of the agent that are hidden, each under another name in its own directory."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def hide(self, paths: list[str], before: package_managers.Saved) -> None:
        """Hide files; show those of the image in their places.

        Raises:
            OSError: One cannot be renamed or written.
        """
        for path in dict.fromkeys(paths):
            if os.path.lexists(path):
                name = f".aenv-{secrets.token_hex(12)}"
                self._places[path] = os.path.join(os.path.dirname(path), name)
                os.rename(path, self._places[path])
            if path in before:
                package_managers.write(path, before[path])

    def put_back(self) -> None:
        """Put the files back.

        Directories and programs that the script has made in the place of one stay.

        Raises:
            OSError: One cannot be renamed.
        """
        for path, place in self._places.items():
            if not os.path.lexists(place):
                continue  # the tests have removed its directory
            is_directory = os.path.isdir(path) and not os.path.islink(path)
            if not os.path.lexists(path):
                os.rename(place, path)
            elif os.path.basename(path) in OF_UV and not is_directory:
                os.unlink(path)
                os.rename(place, path)
        self._places.clear()
