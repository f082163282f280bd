"""References to images: validation and parts."""

from __future__ import annotations

import pytest

from aenv_ray.engines.images.reference import compose, has_tag, is_valid, registry_of, split_tag
from aenv_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("parts", "reference"),
    [
        (("docker.io", "aenv", "todo", "1.0.0"), "docker.io/aenv/todo:1.0.0"),
        (("localhost:5000", "a/b", "todo", "v_1"), "localhost:5000/a/b/todo:v_1"),
        (("localhost", "", "todo", "1"), "localhost/todo:1"),
        (("", "", "my-todo", "1"), "my-todo:1"),
        (("[::1]:5000", "a", "b", "1"), "[::1]:5000/a/b:1"),
    ],
)
def test_a_reference_is_composed(parts, reference):
    assert compose(*parts) == reference


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (("https://ghcr.io", "a", "b", "1"), "registry"),
        (("ghcr.io/team", "a", "b", "1"), "registry"),
        (
            ("myregistry", "a", "b", "1"),
            "registry",
        ),  # a daemon takes it for a namespace of Docker Hub
        (("docker.io", "Team", "b", "1"), "namespace"),
        (("docker.io", "a", "Todo", "1"), "name"),
        (("docker.io", "a", "", "1"), "name"),
        (("docker.io", "a", "b:c", "1"), "name"),
        (("docker.io", "a", "b", "1.0.0+cu"), "tag"),
        (("docker.io", "a", "b", ""), "tag"),
        (("docker.io", "a", "b", "x" * 129), "tag"),
        (("docker.io", "a", "b" * 250, "1"), "255"),
    ],
)
def test_the_error_names_the_invalid_part(parts, what):
    with pytest.raises(ConfigError, match=what):
        compose(*parts)


@pytest.mark.parametrize(
    ("reference", "registry"),
    [
        ("python:3.11", "docker.io"),
        ("library/python", "docker.io"),
        ("index.docker.io/library/python", "docker.io"),
        ("localhost/x", "localhost"),
        ("localhost:5000/x:1", "localhost:5000"),
        ("ghcr.io/a/b@sha256:" + "0" * 64, "ghcr.io"),
    ],
)
def test_the_registry_of_a_reference(reference, registry):
    assert registry_of(reference) == registry


def test_tags_and_ports_are_distinguished():
    assert split_tag("localhost:5000/a/b") == ("localhost:5000/a/b", "latest")
    assert split_tag("localhost:5000/a/b:1") == ("localhost:5000/a/b", "1")
    assert not has_tag("localhost:5000/a/b")
    assert has_tag("a:1")
    assert has_tag("localhost:5000/a@sha256:00")


@pytest.mark.parametrize(
    "reference",
    ["x", "a/b:1", "localhost:5000/a/b:1", "ghcr.io/a/b@sha256:" + "0" * 64, "[::1]:5000/x",
     "sha256:" + "0" * 64],
)  # fmt: skip
def test_names_of_images_are_valid(reference: str) -> None:
    assert is_valid(reference)


@pytest.mark.parametrize(
    "reference",
    ["", "../containers/json", "a/../../b", "a?b=c", "a b", "a:1/../x", "x@sha256:..", "A/b",
     "x:1#", "http://x/y", "sha256:../x", "a\nb"],
)  # fmt: skip
def test_an_image_cannot_name_another_part_of_the_daemons_api(reference: str) -> None:
    """Invariant 7: the name is a part of the path of a request."""
    assert not is_valid(reference)
