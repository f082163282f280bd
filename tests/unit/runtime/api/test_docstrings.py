"""Docstrings in the Google, NumPy and Sphinx styles."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.runtime.api.signature import describe


def google() -> None:
    """Do it.

    In two paragraphs: with a colon.

    Args:
        path (str): Where, for
            example /tmp.
        count: How often.
        *rest: The rest.

    Returns:
        Nothing.

    Raises:
        ValueError: Never.
    """


def numpy() -> None:
    """Do it.

    In two paragraphs: with a colon.

    Parameters
    ----------
    path : str
        Where, for
        example /tmp.
    count
        How often.
    *rest : int
        The rest.

    Returns
    -------
    None
    """


def sphinx() -> None:
    """Do it.

    In two paragraphs: with a colon.

    :param str path: Where, for example /tmp.
    :param count: How often.
    :param rest: The rest.
    :returns: Nothing.
    """


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_all_styles_give_the_same_description(function: Any) -> None:
    body, arguments = describe(function)
    assert body == "Do it.\n\nIn two paragraphs: with a colon."
    assert arguments == {
        "path": "Where, for example /tmp.", "count": "How often.", "rest": "The rest.",
    }  # fmt: skip


def test_without_a_docstring_the_description_is_none() -> None:
    assert describe(lambda: None) == (None, {})


def test_a_section_name_within_a_sentence_is_text() -> None:
    def one() -> None:
        """Do it.

        Returns nothing of note: see the
        arguments below.
        """

    body, arguments = describe(one)
    assert body == "Do it.\n\nReturns nothing of note: see the\narguments below."
    assert arguments == {}


def test_text_after_a_section_is_part_of_the_description() -> None:
    def one() -> None:
        """Do it.

        Args:
            x: An x.

        Be careful with it.
        """

    body, arguments = describe(one)
    assert body is not None
    assert "Be careful" in body
    assert arguments == {"x": "An x."}
