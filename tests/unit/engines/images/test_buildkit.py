"""Which daemons have BuildKit, by what they say of themselves."""

from __future__ import annotations

import pytest

from aenv_ray.engines.images.buildkit import lack

_DOCKER = {"Components": [{"Name": "Engine"}], "ApiVersion": "1.41", "Os": "linux"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, ""),
        ({"ApiVersion": "1.39"}, ""),
        ({"ApiVersion": "1.38"}, "1.38 is older"),
        ({"ApiVersion": ""}, "older"),
        ({"Os": "windows"}, "windows"),
        ({"Components": [{"Name": "Podman Engine"}]}, "Podman"),
    ],
)
def test_a_daemon_without_buildkit_is_known(said, words):
    why = lack({**_DOCKER, **said})
    assert bool(why) == bool(words)
    assert words in why
