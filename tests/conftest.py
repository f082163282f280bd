"""What every test may use: prerequisites that are missing, and an environment without surprises."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import cache

import hypothesis
import pytest

# Machines that run tests are busy: an example is not slow because the machine is. The same examples
# each time, so that a failure is the change's and can be repeated.
hypothesis.settings.register_profile("aenv", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("aenv")

pytest.register_assert_rewrite("aenv_ray.testing")

# A shell starts what runs in the background with SIGINT ignored, and our children would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRED = frozenset(filter(None, os.environ.get("AENV_REQUIRE", "").split(",")))
"""Prerequisites without which a test fails rather than skips: all of them, in CI."""
KNOWN = frozenset(
    {"namespaces", "docker", "buildkit", "registry", "redis", "browser", "fresh-clone"}
)


def require(name: str, available: bool, reason: str) -> None:
    """Skip the test where a prerequisite is missing, visibly; fail where AENV_REQUIRE names it."""
    if available:
        return
    if name in REQUIRED:
        pytest.fail(f"{name} is required here (AENV_REQUIRE), but: {reason}", pytrace=False)
    pytest.skip(f"needs {name}: {reason}")


@cache
def namespaces_refusal() -> str:
    """Return why this machine gives us no namespaces; empty when it does."""
    if sys.platform != "linux":
        return f"{sys.platform} has none"
    probe = (
        "import os; os.unshare(os.CLONE_NEWUSER)"
        if hasattr(os, "unshare")
        else "from aenv_ray.runtime import linux as l;"
        "l.unshare(l.CLONE_NEWUSER | l.CLONE_NEWNS | l.CLONE_NEWPID | l.CLONE_NEWNET)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@cache
def docker_refusal() -> str:
    """Return why there is no Docker daemon to test with; empty when there is."""
    for program in ("docker", "mmdebstrap"):  # base images are made: tests need no registry
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.stderr.strip() if done.returncode else ""


def pytest_configure(config: pytest.Config) -> None:
    unknown = REQUIRED - KNOWN
    if unknown:
        raise pytest.UsageError(f"AENV_REQUIRE names {sorted(unknown)}; known: {sorted(KNOWN)}")


@pytest.fixture(autouse=True, scope="session")
def _no_logins_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the developer's own logins for registries out of the tests."""
    os.environ["DOCKER_CONFIG"] = str(tmp_path_factory.mktemp("docker-config"))


@pytest.fixture(autouse=True)
def _marks_are_prerequisites(request: pytest.FixtureRequest) -> None:
    """Skip or fail tests marked `namespaces` or `docker` where there are none."""
    if request.node.get_closest_marker("namespaces"):
        require("namespaces", not namespaces_refusal(), namespaces_refusal())
    if request.node.get_closest_marker("docker"):
        require("docker", not docker_refusal(), docker_refusal())


@pytest.fixture(autouse=True, scope="session")
def _no_settings_of_the_user() -> None:
    """Keep the developer's own settings out of the tests."""
    for name in ("AENV_ENGINE", "AENV_ISOLATION", "AENV_SYSTEM_URL", "DUMMY_INSTANCE_IP"):
        os.environ.pop(name, None)
