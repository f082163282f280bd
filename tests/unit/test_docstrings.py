"""Descriptions for a model come from docstrings in the three usual layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.runtime.docstrings import describe


def google(path: str, limit: int, *rest: Any, **options: Any) -> None:
    """Read a file.

    Lines are numbered: the first is 1.

    Args:
        path (str): Where it is,
            relative to the work directory.
        limit: At most this many: lines.
        *rest: More.
        **options: Even more.

    Returns:
        The text.

    Raises:
        OSError: It cannot be read.
    """


def numpy(path: str, limit: int) -> None:
    """Read a file.

    Lines are numbered: the first is 1.

    Parameters
    ----------
    path : str
        Where it is,
        relative to the work directory.
    limit : int, optional
        At most this many: lines.

    Returns
    -------
    str
        The text.
    """


def sphinx(path: str, limit: int) -> None:
    """Read a file.

    Lines are numbered: the first is 1.

    :param str path: Where it is, relative to the work directory.
    :param limit: At most this many: lines.
    :returns: The text.
    :rtype: str
    :raises OSError: It cannot be read.
    """


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_three_layouts_say_the_same(function: Callable[..., Any]) -> None:
    description, arguments = describe(function)
    assert description == "Read a file.\n\nLines are numbered: the first is 1."
    assert arguments["path"] == "Where it is, relative to the work directory."
    assert arguments["limit"] == "At most this many: lines."


def test_starred_arguments_are_known_by_their_names() -> None:
    _, arguments = describe(google)
    assert (arguments["rest"], arguments["options"]) == ("More.", "Even more.")


def test_without_a_docstring_there_is_no_description() -> None:
    def bare() -> None: ...

    def empty() -> None:
        """"""

    assert describe(bare) == (None, {})
    assert describe(empty) == (None, {})


def test_words_like_section_names_stay_text() -> None:
    def notes() -> None:
        """Return

        Notes are kept. Args
        and examples: too.
        """

    description, arguments = describe(notes)
    assert description == "Return\n\nNotes are kept. Args\nand examples: too."
    assert arguments == {}


def test_text_after_a_section_is_description_again() -> None:
    def after(a: int) -> None:
        """First.

        Args:
            a: One.
        Last.
        """

    description, arguments = describe(after)
    assert description is not None
    assert description.split() == ["First.", "Last."]
    assert arguments == {"a": "One."}


def test_an_argument_without_a_text_has_none() -> None:
    def silent(a: int) -> None:
        """First.

        Args:
            a:
        """

    assert describe(silent) == ("First.", {})
