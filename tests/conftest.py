"""Fixtures of every test: prerequisites, and an environment without the user's settings."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache

import hypothesis
import pytest

pytest.register_assert_rewrite("aenv_ray.testing", "tests.contract")  # before any of it is imported

from tests.groups import group_of  # noqa: E402
from tests.ray.cluster import SHARED, Cluster, local_cluster  # noqa: E402
from tests.verdicts import Verdicts  # noqa: E402

# Test machines are busy, so examples have no deadline. Examples are the same in each run, so that a
# failure can be reproduced.
hypothesis.settings.register_profile("aenv", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("aenv")

# A shell starts background jobs with SIGINT ignored, which our children would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["fixtures"]  # projects whose tests are not ours

REQUIRED = frozenset(filter(None, os.environ.get("AENV_REQUIRE", "").split(",")))
"""Prerequisites without which a test fails instead of skipping; CI sets all of them."""
KNOWN = frozenset(
    {
        "browser",
        "buildkit",
        "compiler",
        "crun",
        "curl",
        "docker",
        "frameworks",
        "fresh-clone",
        "git",
        "kubectl",
        "mcp-conformance",
        "namespaces",
        "netns",
        "prometheus",
        "published-client",
        "redis",
        "registry",
        "runsc",
        "systemd",
        "xfs",
    }
)


def require(name: str, available: bool, reason: str) -> None:
    """Skip the test if a prerequisite is missing; fail if AENV_REQUIRE names it."""
    if available:
        return
    if name in REQUIRED:
        pytest.fail(f"{name} is required here (AENV_REQUIRE), but: {reason}", pytrace=False)
    pytest.skip(f"needs {name}: {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tasks", action="append", default=[], metavar="NAME=PATH",
        help="real tasks of a built-in environment, for tests/ray/envs/test_given_tasks.py",
    )  # fmt: skip
    parser.addoption(
        "--tasks-limit", type=int, default=10, help="how many of them are played (default: 10)"
    )


def without_rays_words(text: str) -> str:
    """Return printed text without the lines of a Ray that an earlier test started."""
    return re.sub(r"(\x1b\[\d+m)?\(raylet\)(\x1b\[0m)? .*\n", "", text)


@cache
def namespaces_refusal() -> str:
    """Return why namespaces are not available here; empty if they are."""
    if sys.platform != "linux":
        return f"{sys.platform} has none"
    probe = (
        "import os; os.unshare(os.CLONE_NEWUSER)"
        if hasattr(os, "unshare")
        else "from aenv_ray.runtime.system import linux as l;"
        "l.unshare(l.CLONE_NEWUSER | l.CLONE_NEWNS | l.CLONE_NEWPID | l.CLONE_NEWNET)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@cache
def docker_refusal() -> str:
    """Return why there is no Docker daemon to test with; empty if there is one."""
    for program in (
        "docker",
        "mmdebstrap",
    ):  # tests build their base images
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.stderr.strip() if done.returncode else ""


@cache
def redis_refusal() -> str:
    """Return why there is no Redis to test with; empty if there is one."""
    from aenv_ray.errors import ConfigError
    from aenv_ray.hub.redis.server import find_program

    try:
        find_program()
    except ConfigError as exc:
        return exc.message
    return ""


def _share_requirements(config: pytest.Config) -> None:
    """Let all tests of the run, in all of its processes, install each set of requirements once."""
    if shared := os.environ.get("AENV_TEST_DIRECTORY"):  # of scripts/run_tests.py
        os.environ["AENV_REQUIREMENTS_CACHE"] = f"{shared}/requirements"
        return
    directory = tempfile.mkdtemp(prefix="aenv-requirements-")
    os.environ["AENV_REQUIREMENTS_CACHE"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_configure(config: pytest.Config) -> None:
    _share_requirements(config)
    unknown = REQUIRED - KNOWN
    if unknown:
        raise pytest.UsageError(f"AENV_REQUIRE names {sorted(unknown)}; known: {sorted(KNOWN)}")
    config.pluginmanager.register(Verdicts(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off objects that live until the end of the run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a group together, so that one Ray serves them."""
    sharing = {item.path for item in items if "cluster" in fixtures_of(item)}
    if alone := sorted(str(path) for path in sharing if group_of(path) is None):
        raise pytest.UsageError(f"they share a Ray; add them to tests/groups.py: {alone}")
    items.sort(key=lambda item: group_of(item.path) or "without")


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the shared Ray of this process once its last module is done, not with the session."""
    if group_of(item.path) is None:
        SHARED.close()


def fixtures_of(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(autouse=True, scope="session")
def _no_logins_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the developer's registry logins from the tests."""
    os.environ["DOCKER_CONFIG"] = str(tmp_path_factory.mktemp("docker-config"))


@pytest.fixture(autouse=True)
def _marks_are_prerequisites(request: pytest.FixtureRequest) -> None:
    """Skip or fail tests marked `namespaces`, `docker` or `redis` if those are missing."""
    if request.node.get_closest_marker("namespaces"):
        require("namespaces", not namespaces_refusal(), namespaces_refusal())
    if request.node.get_closest_marker("docker"):
        require("docker", not docker_refusal(), docker_refusal())
    if request.node.get_closest_marker("redis"):
        require("redis", not redis_refusal(), redis_refusal())


@pytest.fixture(autouse=True, scope="session")
def _no_settings_of_the_user() -> None:
    """Hide the developer's settings from the tests."""
    for name in (
        "AENV_ENGINE", "AENV_ISOLATION", "AENV_SYSTEM_URL", "DUMMY_INSTANCE_IP", "AENV_REDIS_URL",
        "AENV_REDIS_PREFIX", "AENV_PYTHON",
    ):  # fmt: skip
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yield the local Ray that the tests of this process share; one takes seconds to start."""
    yield SHARED.enter_context(local_cluster())
    SHARED.close()
