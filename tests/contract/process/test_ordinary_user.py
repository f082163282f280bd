"""The process engine needs no root: part of its contract, run as a user without privileges."""

from __future__ import annotations

import os

import pytest

from tests.ordinary_user import pytest_as_ordinary_user

pytestmark = pytest.mark.namespaces

TESTS = (
    "test_a_started_sandbox or test_one_that_fails or ends_whatever or sandboxs_own or outlives "
    "or the_deadline_ends or full_directory or a_timeout_kills or variables or stop_during "
    "or fork_bomb or every_privilege or read_only or children or grandchild"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="this user is ordinary: every test here shows it")
@pytest.mark.timeout(600)
def test_the_contract_holds_for_an_ordinary_user() -> None:
    """No root."""
    pytest_as_ordinary_user(
        "-k", f"({TESTS}) and not Fake and not Without and not Docker",
        "tests/contract/test_engines.py", "tests/contract/process/test_isolation.py",
        "tests/contract/process/test_storage.py",
    )  # fmt: skip
