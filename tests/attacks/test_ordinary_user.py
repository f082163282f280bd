"""Attacks on the process engine of a user without privileges: tests marked `ordinary_user`."""

from __future__ import annotations

import os

import pytest

from tests.ordinary_user import pytest_as_ordinary_user


@pytest.mark.namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="this user is ordinary: every test here shows it")
def test_attacks_fail_on_the_node_of_an_ordinary_user() -> None:
    pytest_as_ordinary_user("-m", "ordinary_user and not docker", "tests/attacks")
