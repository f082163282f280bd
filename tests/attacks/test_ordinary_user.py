"""Attacks on the engines of a user without privileges: tests marked `ordinary_user`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.docker.docker_node import ADDRESS, base_image
from tests.ordinary_user import pytest_as_ordinary_user


@pytest.mark.namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="this user is ordinary: every test here shows it")
@pytest.mark.timeout(600)
def test_attacks_fail_on_the_node_of_an_ordinary_user() -> None:
    pytest_as_ordinary_user("-m", "ordinary_user and not docker", "tests/attacks")


@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="this user is ordinary: every test here shows it")
@pytest.mark.timeout(600)
def test_attacks_fail_in_the_containers_of_an_ordinary_user() -> None:
    """The user is in the group of the daemon's socket, and cannot set packet filter rules."""
    base_image()  # made by root: an ordinary user cannot
    socket = Path(ADDRESS.removeprefix("unix://"))
    pytest_as_ordinary_user(
        "-m", "ordinary_user and docker", "tests/attacks", group=socket.stat().st_gid
    )
