"""The public names: listed in order, importable, documented."""

from __future__ import annotations

import importlib
import inspect

import pytest

import aenv_ray


def test_the_names_are_sorted_and_each_has_a_home() -> None:
    assert aenv_ray.__all__ == sorted(aenv_ray.__all__)
    assert list(aenv_ray._HOMES) == aenv_ray.__all__


@pytest.mark.parametrize("name", aenv_ray.__all__)
def test_each_name_is_that_of_its_home_and_documented(name: str) -> None:
    value = getattr(aenv_ray, name)
    assert value is getattr(importlib.import_module(aenv_ray._HOMES[name]), name)
    assert inspect.getdoc(value)
    assert value.__name__ == name


@pytest.mark.parametrize("name", aenv_ray.__all__)
def test_each_public_method_is_documented(name: str) -> None:
    value = getattr(aenv_ray, name)
    members = vars(value).items() if inspect.isclass(value) else ()
    for member, thing in members:
        if not member.startswith("_") and (callable(thing) or isinstance(thing, property)):
            assert inspect.getdoc(thing), f"{name}.{member}"


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING and the lazy ones are two lists of one thing."""
    source = inspect.getsource(aenv_ray)
    _, _, block = source.partition("if TYPE_CHECKING:\n")
    block, _, _ = block.partition("\n__version__")
    for name, home in aenv_ray._HOMES.items():
        _, found, imported = block.partition(f"from {home} import ")
        assert found, home
        assert name in imported.partition("\n    from ")[0].replace(",", " ").split()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        getattr(aenv_ray, "no_such_name")  # noqa: B009  # mypy would refuse the plain form
