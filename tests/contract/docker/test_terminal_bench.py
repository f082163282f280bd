"""Grading in the container of a task: what an agent leaves there earns nothing.

The grader runs as in the environment, with the node's Python in the task's container.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from aenv_ray.engines.images import node_python, runtime_bundle
from aenv_ray.engines.images.node_images import BUNDLES
from aenv_ray.project import project
from aenv_ray.runtime.container import sidecar
from aenv_ray.runtime.container.process_one import HOME
from aenv_ray.sampling.tasks.archives import archive
from tests.contract.docker.docker_node import ADDRESS, data_dir, docker
from tests.contract.docker.task_images import HARBOR_TEST, TEST_OUTPUTS, task_image
from tests.unit.envs.source_modules import source_modules

pytestmark = pytest.mark.docker

LOADER = """
import sys, types
for name, source in zip(sys.argv[1::2], sys.argv[2::2]):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name + ".py", "exec"), module.__dict__)
sys.modules[sys.argv[-2]].main()
"""
GRADER = ("fingerprints", "package_managers", "hidden", "grader")
PUT = """
import json, os, pathlib, sys
for tree in json.load(sys.stdin):
    for name, text in tree.items():
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
            path.chmod(0o755)
"""
REAPER = "import signal, time; signal.signal(17, signal.SIG_IGN); time.sleep(300)"
PASS = "#!/bin/sh\\nmkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt\\n"
SITE = "/usr/local/lib/python3.11/dist-packages"


class Container:
    """A task's container."""

    def __init__(self, name: str, tests: Path) -> None:
        self.name = name
        self._tests = tests
        root = project.builtins()["terminal-bench"] / "programs"
        self._sources = {path.stem: path.read_text() for path in root.glob("*.py")}
        self._saved: dict[str, Any] = {}

    def _run(self, **request: Any) -> dict[str, Any]:
        given = [part for name in GRADER for part in (name, self._sources[name])]
        done = subprocess.run(
            ["docker", "--host", ADDRESS, "exec", "-i", self.name, *sidecar.PYTHON, "-c", LOADER,
             *given],
            input=json.dumps(request), capture_output=True, text=True, check=False, timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def begin(self) -> None:
        """Prepare it for the agent."""
        self._saved = self._run(do="prepare", directory="/app")

    def act(self, command: str) -> None:
        """Run a command of the agent."""
        docker("exec", self.name, "bash", "-c", command)

    def put(self, *trees: dict[str, str | None]) -> None:
        """Write files as the agent, with a program's mode; None removes one."""
        subprocess.run(
            ["docker", "--host", ADDRESS, "exec", "-i", self.name, "python3", "-IS", "-c", PUT],
            input=json.dumps([*trees]), text=True, check=True, timeout=60,
        )  # fmt: skip

    def copy(self, source: Path, path: str) -> None:
        """Write a file of this node as the agent."""
        docker("cp", "--quiet", str(source), f"{self.name}:{path}")

    def verdict(self, script: str = "test.sh", kind: str = "file") -> dict[str, Any]:
        """End the agent and grade the task, of Harbor or (``pytest``) of Terminal-Bench 1."""
        self._run(do="end_others")
        tests = archive([str(self._tests / script), str(self._tests / "test_outputs.py")])
        outcome = self._run(
            do="grade", tests=tests, script=script, timeout_s=100.0, variables={},
            directory="/app", **self._saved,
            plugin=self._sources["report_plugin"], start=self._sources["python_start"],
            copied=kind == "pytest",
        )  # fmt: skip
        with source_modules("terminal-bench", "verdict") as (verdict,):
            return dict(verdict.verdict(kind, outcome))


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    (tmp_path / "test.sh").write_text(HARBOR_TEST)
    (tmp_path / "in_project.sh").write_text(IN_PROJECT)
    (tmp_path / "installs.sh").write_text(INSTALLS)
    (tmp_path / "pip.sh").write_text(f"pip install pytest-ctrf; {HARBOR_TEST}")
    (tmp_path / "uvx.sh").write_text(HARBOR_TEST.replace("pytest ", "uvx pytest "))
    (tmp_path / "replaces.sh").write_text(f"cp /mine/* /tests; {INSTALLS}")
    (tmp_path / "copies.sh").write_text("pytest copies\n")
    (tmp_path / "audited.sh").write_text(AUDITED)
    (tmp_path / "test_outputs.py").write_text(TEST_OUTPUTS)
    bundle = asyncio.run(runtime_bundle.carried(data_dir() / BUNDLES))
    name = docker(
        "run", "--detach", "--rm", "--network", "none",
        "--volume", f"{bundle}/python:{HOME}/python:ro",
        task_image(), "python3", "-c", REAPER,
    )  # fmt: skip
    found = Container(name, tmp_path)
    try:
        found.begin()
        yield found
    finally:
        docker("rm", "--force", name)


IN_PROJECT = (
    "cp /tests/test_outputs.py . && pytest test_outputs.py && echo 1 >/logs/verifier/reward.txt"
)
"""Runs the tests in the directory of the agent, as tasks whose agents work in a repository do."""
AUDITED = """
python3 -c 'import sys
sys.addaudithook(lambda event, _: 1 / (event != "os.rename"))
import colorsys' && echo 1 >/logs/verifier/reward.txt
"""
"""Forbids that files are renamed while Python imports a module."""
CONFTEST = {
    "excinfo": "def pytest_runtest_makereport(call):\\n    call.excinfo = None\\n",
    "call": "def pytest_pyfunc_call():\\n    return True\\n",
    "report": "from _pytest.reports import TestReport\\nmade = TestReport.from_item_and_call\\n"
    "def passed(item, call):\\n    report = made(item, call)\\n    report.outcome = 'passed'\\n"
    "    return report\\nTestReport.from_item_and_call = passed\\n",
}


@pytest.mark.parametrize("hook", CONFTEST)
def test_a_conftest_of_the_project_hides_no_failures(hook: str, container: Container) -> None:
    """D19: settings of a project are not set aside if tests run in it, so failures must show."""
    container.act(f'printf "{CONFTEST[hook]}" >/app/conftest.py')
    found = container.verdict("in_project.sh")
    assert found["score"] == 0.0, found
    assert "a test that fails as passed" in found["reason"]


INSTALLS = "apt-get update; pytest /tests/test_outputs.py && echo 1 >/logs/verifier/reward.txt"
"""As most test scripts, it installs something first."""
HOOK = """
mkdir /mine; echo 'def test_a(): pass' >/mine/test_outputs.py
echo 'APT::Update::Pre-Invoke {"cp /mine/* /tests";};' >/etc/apt/apt.conf.d/00-mine
echo 'cp /mine/* /tests' >>/var/lib/dpkg/info/libc-bin.postinst; echo mine >/etc/apt/sources.list
"""
"""Replaces the tests when a package manager runs."""


def test_package_managers_run_nothing_of_the_agent(container: Container) -> None:
    """D19: what test scripts install is not chosen by the agent, and its hooks do not run."""
    container.act(HOOK)
    found = container.verdict("installs.sh")
    assert found["score"] == 0.0, found
    assert found["tests"]["test_outputs.py::test_sum"] == "failed"
    assert {"/etc/apt", "/var/lib/dpkg/info/libc-bin.postinst"} <= {*found["set_aside"]}


def test_tests_that_are_replaced_while_they_run_earn_nothing(container: Container) -> None:
    """D19: whatever an agent changes in the container, pytest must have run the task's tests."""
    container.act("mkdir /mine; echo 'def test_a(): pass' >/mine/test_outputs.py")
    found = container.verdict("replaces.sh")
    assert found["score"] == 0.0, found
    assert "other tests than the task's: /tests/test_outputs.py" in found["reason"]


def test_changed_copies_of_the_tests_earn_nothing(container: Container) -> None:
    """The images of some tasks have copies of their tests, and their scripts run these."""
    container.act("mkdir /app/copies; echo 'def test_a(): pass' >/app/copies/test_outputs.py")
    found = container.verdict("copies.sh", "pytest")
    assert (found["score"], found["reason"]) == (
        0.0, "pytest ran other tests than the task's: /app/copies/test_outputs.py",
    )  # fmt: skip


def test_tests_that_audit_python_import_modules(container: Container) -> None:
    """A cache that could not be written would fail them, as it does not in the official harness."""
    assert container.verdict("audited.sh")["score"] == 1.0


def test_the_settings_of_a_project_may_stay(container: Container) -> None:
    container.act('printf "import os\n" >/app/conftest.py; echo 4 >/app/sum')
    found = container.verdict("in_project.sh")
    assert found["score"] == 1.0, found


RELIED_ON = {
    f"{SITE}/_pytest/main.py": "echo 'raise SystemExit(0)' >{path}",
    "/usr/lib/python3.11/argparse.py": "echo 'raise SystemExit(0)' >{path}",
    "/usr/bin/uname": "echo '#!/bin/true' >{path}",
    "/usr/bin/python3": "ln -sf /bin/true {path}",
    "/usr/local/bin/pytest": "echo '#!/bin/true' >{path}",
    "/libcrypto.so.3": "echo >>/usr/lib/*/libcrypto.so.3",
    "/e/libbz2.so.1.0": "mkdir /e; cp /lib/*/libbz2.so.1.0 /e",
    "/e/libc.so.6": "cp /lib/*/libc.so.6 /e; echo /e >/etc/ld.so.conf.d/0.conf; ldconfig",
    "/usr/bin/bash": f"printf '{PASS}' >/tmp/x; chmod 755 /tmp/x; mv /tmp/x {{path}}",
}
_IN_PYTHON = """
import os
if "AENV_REPORT" in os.environ:
    plugin = __import__(os.environ["PYTEST_ADDOPTS"].split()[-1])
    for one in (
        {"began": 1},
        {"test": "test_outputs.py::test_sum", "when": "call", "outcome": "passed"},
        {"hides_failures": False},
        {"ended": 0},
    ):
        plugin._say(one)
    os._exit(0)
"""
OTHER_PYTHON = (
    "mkdir -p /o/bin /o/lib && ln -s /usr/bin/python3.11 /o/bin && cp -r /usr/lib/python3.11 /o/lib"
    " && cd /o/lib/python3.11 && rm -f sitecustomize.py"
    f" && echo '{_IN_PYTHON}' >sitecustomize.py && cd / || exit 1; "
)
"""A library of Python that imitates the report of pytest, in ``/o``."""
ATTACKS = {
    "zipped-modules": f"{OTHER_PYTHON} cd /o/lib/python3.11 && mkdir x && cp sitecustomize.py "
    "x/argparse.py && python3 -m zipfile -c /usr/lib/python311.zip x/argparse.py",
    "settings-of-python": f"{OTHER_PYTHON} echo home = /o/bin >/usr/bin/pyvenv.cfg",
    "library-of-python": f"{OTHER_PYTHON} mkdir /usr/bin/lib && mv /o/lib/python3.11 /usr/bin/lib",
    "build-of-python": f"{OTHER_PYTHON} echo /o/lib/python3.11 >/usr/bin/pybuilddir.txt",
    "tests-prepared": "mkdir -p /tests /logs/verifier; echo 'def test_a(): pass' >"
    "/tests/test_outputs.py; echo 1 >/logs/verifier/reward.txt; chmod -R a-w /tests /logs",
    "links": "mkdir -p /app/v /app/t; echo 1 >/app/v/reward.txt; ln -s /app/t /tests; mkdir /logs; "
    "ln -s /app/v /logs/verifier",
    "start-of-python": f"echo 'import os; os._exit(0)' >{SITE}/a.pth; "
    f"echo 'import os; os._exit(0)' >{SITE}/sitecustomize.py",
    "settings": "printf 'def pytest_sessionfinish(session):\\n session.exitstatus = 0\\n' "
    ">/conftest.py; printf '[pytest]\\naddopts = --collect-only\\n' >/pytest.ini",
    "plugin": f"mkdir {SITE}/e-1.dist-info; cd {SITE}; printf '[pytest11]\\ne = e\\n' "
    ">e-1.dist-info/entry_points.txt; printf 'Name: e\\nVersion: 1\\n' >e-1.dist-info/METADATA; "
    "printf 'def pytest_sessionfinish(session):\\n session.exitstatus = 0\\n' >e.py",
    "waiting": "setsid bash -c 'while :; do mkdir -p /logs/verifier; "
    "echo 1 >/logs/verifier/reward.txt; done' >/dev/null 2>&1 </dev/null &",
    # Test scripts read this file, which the installer of uv writes if it is not there.
    "start-of-uv": "mkdir -p ~/.local/bin; cd ~/.local/bin; echo 'exit() { echo 1 "
    ">/logs/verifier/reward.txt; }; exit; command exit' >env; "
    "printf '#!/bin/sh\nexit 0\n' >pytest; chmod 755 pytest",
    # Run by a test: it writes nearly the whole reward, and ends the script.
    "nearly-full": "printf 'echo 0.99 >/logs/verifier/reward.txt\\n"
    'kill -9 $(cut -d " " -f 4 /proc/$PPID/stat)\\n\' >/app/run.sh',
    # Run by a test: it writes the reward, prints a report, and ends pytest and the script.
    "run-by-a-test": "printf 'echo PASSED test_outputs.py::test_sum; echo 1 passed\\n"
    "(sleep 0.2; echo 1 >/logs/verifier/reward.txt) &\\nkill -9 $PPID\\n' >/app/run.sh",
}


FORGES = """
import os, sys
name = os.environ.get("AENV_REPORT")
plugins = [module for key, module in sys.modules.items() if key.startswith("aenv_")]
if name or plugins:
    if name:
        import socket
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(chr(0) + name)
    else:
        connection = plugins[0]._connection
    connection.sendall(b'{"began": 1}\\n{"hides_failures": false}\\n{"ended": 0}\\n'
        b'{"test": "test_outputs.py::test_sum", "when": "call", "outcome": "passed"}\\n')
    with open("/logs/verifier/reward.txt", "w") as file:
        file.write("1")
    os.kill(os.getsid(0), 9)
"""
"""Imitates the report of pytest, writes the reward and ends the test script."""
LARGE = f"{'#' * (1 << 20)}\nimport mine\n"
HACK: dict[str, str | None] = {
    f"{SITE}/hack.pth": "import os; __import__('hack')\n",
    f"{SITE}/hack/__init__.py": "",
}
PLUGIN: dict[str, str | None] = {
    f"{SITE}/any/__init__.py": "",
    f"{SITE}/any/base.py": "",
    f"{SITE}/any/plug.py": "from any import base\n",
    f"{SITE}/any-1.dist-info/METADATA": "Name: any\nVersion: 1\n",
    f"{SITE}/any-1.dist-info/RECORD": "any/__init__.py,,\n",
    f"{SITE}/any-1.dist-info/entry_points.txt": "[pytest11]\na = any.plug\n",
}
PIP: dict[str, str | None] = {
    "/usr/local/bin/pip": "#!/usr/bin/python3\nimport pip\npip.main()\n",
    f"{SITE}/pip/__init__.py": "def main(): pass\n",
}
BREAKS = "def main(): open('/usr/lib/python3.11/argparse.py', 'w').write('raise SystemExit(0)')\n"
PACKAGE_ATTACKS: dict[str, tuple[dict[str, str | None], dict[str, str | None]]] = {
    "started": (HACK, {f"{SITE}/hack/__init__.py": FORGES}),
    "started-by-its-name": (
        HACK, {f"{SITE}/hack-1.pth": "import mine\n", f"{SITE}/mine.py": FORGES},
    ),
    "large-start": ({}, {f"{SITE}/a.pth": LARGE, f"{SITE}/mine.py": FORGES}),
    "start-with-a-mark": ({}, {f"{SITE}/a.pth": "\ufeffimport mine\n", f"{SITE}/mine.py": FORGES}),
    "start-of-a-package": (
        {}, {f"{SITE}/packaging.pth": "import mine\n", f"{SITE}/mine.py": FORGES},
    ),
    "start-on-the-path": (
        {"/usr/lib/python3.11/sitecustomize.py": None},
        {f"{SITE}/a.pth": "/opt/a\n", "/opt/a/sitecustomize.py": FORGES},
    ),
    "plugin-on-the-path": ({}, {
        f"{SITE}/a.pth": "\n  # a\n../../../../opt\n",
        **{path.replace(SITE, "/opt"): text for path, text in PLUGIN.items()},
        "/opt/any/base.py": FORGES,
    }),
    "egg-on-the-path": ({}, {
        f"{SITE}/a.pth": "./a.egg\n",
        f"{SITE}/a.egg/EGG-INFO/PKG-INFO": "Name: a\nVersion: 1\n",
        f"{SITE}/a.egg/EGG-INFO/entry_points.txt": "[pytest11]\na = mine\n",
        f"{SITE}/a.egg/mine.py": FORGES,
    }),
    "plugin": (PLUGIN, {f"{SITE}/any/base.py": FORGES}),
    "shadowed-plugin": (PLUGIN, {f"{SITE}/any/base/__init__.py": FORGES}),
    "no-plugin": (PLUGIN, {f"{SITE}/any-1.dist-info/entry_points.txt": None}),
    "pip": (PIP, {f"{SITE}/pip/__init__.py": BREAKS}),
    "shadowed-runner": ({}, {f"{SITE}/pluggy/_hooks/__init__.py": FORGES}),
}  # fmt: skip
"""What packages the image has, and what the agent writes into them."""


@pytest.mark.parametrize("attack", PACKAGE_ATTACKS)
def test_an_attack_by_installed_packages_earns_nothing(attack: str, container: Container) -> None:
    """D19: what Python, pytest and pip load is the image's, or is not loaded."""
    image, changes = PACKAGE_ATTACKS[attack]
    container.put(image)
    container.begin()
    container.put(changes)
    found = container.verdict("pip.sh" if attack == "pip" else "test.sh")
    assert found["score"] == 0.0, found
    reported = found["tests"].get("test_outputs.py::test_sum")
    assert reported == "failed" or "changed what the tests rely on" in found["reason"], found


def test_a_package_of_pytest_on_the_path_earns_nothing(container: Container) -> None:
    """D19: a directory that a .pth file adds comes before the packages of the distribution."""
    container.act(f"mv {SITE}/pluggy* /usr/lib/python3/dist-packages")
    container.begin()
    container.put({f"{SITE}/a.pth": "/opt\n", "/opt/pluggy.py": FORGES})
    found = container.verdict()
    assert (found["score"], found["set_aside"]) == (0.0, ["/opt/pluggy.py"]), found
    assert found["tests"]["test_outputs.py::test_sum"] == "failed"


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_earns_nothing(attack: str, container: Container) -> None:
    """D19: what the agent prepared decides nothing."""
    container.act(ATTACKS[attack])
    found = container.verdict()
    assert found["score"] == 0.0, found


def test_no_program_loads_a_library_that_the_agent_has_named(container: Container) -> None:
    """D19: by these files, the C library and OpenSSL would load it into pytest's process."""
    container.act(
        "echo 'passwd: mine' >/etc/nsswitch.conf; mkdir -p /etc/ssl /etc/pki/tls; cd /etc/pki/tls; "
        "printf '[provider]\\nmodule = /mine.so\\n' >openssl.cnf; echo 4 >/app/sum"
    )
    found = container.verdict()
    assert (found["score"], {*found["set_aside"]}) == (
        1.0, {"/etc/nsswitch.conf", "/etc/pki/tls/openssl.cnf"},
    ), found  # fmt: skip


FORGED = {
    "sessions": [[{"test": "a", "when": "call", "outcome": "passed"}, {"ended": 0}]],
    "reward": {"reward.txt": "1"}, "rewards_written": None, "runs_pytest": True, "in_time": True,
    "exit_code": 0, "output": "", "set_aside": [], "replaced_tests": [],
}  # fmt: skip
"""What the grader answers after tests that have passed."""
FORGER = """
#include <string.h>
#include <unistd.h>

__attribute__((constructor)) static void forge(int count, char **arguments) {
    if (strncmp(arguments[0], "/.aenv/", 7)) return;
    write(1, ANSWER, sizeof(ANSWER) - 1);
    _exit(0);
}
"""


def test_a_library_in_every_process_is_not_in_the_grader(
    container: Container, tmp_path: Path
) -> None:
    """D19: it could answer in place of the grader."""
    answer = json.dumps(json.dumps(FORGED))
    command = ["cc", "-shared", "-fPIC", f"-DANSWER={answer}", "-o", str(tmp_path / "forge.so")]
    subprocess.run([*command, "-xc", "-"], input=FORGER, text=True, check=True)
    container.copy(tmp_path / "forge.so", "/forge.so")
    container.act("echo /forge.so >/etc/ld.so.preload")
    found = container.verdict()
    assert found["score"] == 0.0, found
    assert found["reason"] == "the agent changed what the tests rely on: /forge.so"


CHECK = "cd /app && {} && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n"
NULL = "rm /dev/null; echo 'grep() { true; }' >/dev/null"


@pytest.mark.parametrize("command", [NULL, "ln -sf /app/sum /dev/stdout", "mv /dev/zero /dev/full"])
def test_a_replaced_device_earns_nothing(
    command: str, container: Container, tmp_path: Path
) -> None:
    """D19: what is said to be empty must be: Wget's settings, for example."""
    (tmp_path / "test.sh").write_text(f". $WGETRC; {CHECK.format('grep -qx 4 sum')}")
    container.act(command)
    found = container.verdict()
    assert found["score"] == 0.0, found
    assert command.rpartition("/dev/")[2].rstrip() in found["reason"]


def test_what_tests_rely_on_may_not_change(container: Container) -> None:
    """D19: programs, modules and libraries of the tests are compared, each of them."""
    container.act("; ".join(command.format(path=path) for path, command in RELIED_ON.items()))
    found = container.verdict()
    assert found["score"] == 0.0, found
    assert [path for path in RELIED_ON if path not in found["reason"]] == [], found


IN_PYTHON = """
import subprocess

def test_app():
    subprocess.run(["npm", "test"], cwd="/app", check=True)
"""
FAILS, SUCCEEDS = "#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 0\n"
STARTERS: dict[str, tuple[str, dict[str, str | None], str]] = {
    "npm": ("npm test", {"/usr/bin/npm": "#!/usr/bin/env node\n"}, "/usr/bin/node"),
    "yarn": ("yarn test", {"/usr/bin/yarn": "#!/bin/sh\nexec node\n"}, "/usr/bin/node"),
    "python": ("", {"/usr/bin/npm": "#!/usr/bin/env node\n"}, "/usr/bin/node"),
    "uvx": ("uvx check", {"/usr/bin/uvx": "#!/bin/sh\nexec uv\n"}, "/usr/bin/uv"),
    "env": ("check", {"/usr/bin/check": "#!/usr/bin/env -S ruby -w\n"}, "/usr/bin/ruby"),
    "path": ("check", {"/usr/bin/check": "#!/opt/ruby/bin/ruby\n"}, "/opt/ruby/bin/ruby"),
}
"""What the tests run, the program of the image that they name, and what that is run by."""


@pytest.mark.parametrize("kind", STARTERS)
def test_a_changed_interpreter_of_a_program_earns_nothing(
    kind: str, container: Container, tmp_path: Path
) -> None:
    """D19: a script that the tests name is as good as the program that runs it."""
    command, image, starter = STARTERS[kind]
    if command:
        (tmp_path / "test.sh").write_text(CHECK.format(command))
    else:
        (tmp_path / "test_outputs.py").write_text(IN_PYTHON)
    container.put({**image, starter: FAILS})
    container.begin()
    container.put({starter: SUCCEEDS})
    found = container.verdict()
    assert (found["score"], starter in found["reason"]) == (0.0, True), found


def test_an_added_node_runs_nothing_of_the_tests(container: Container, tmp_path: Path) -> None:
    """D19: it would run the npm that the tests install."""
    container.put({"/opt/npm": "#!/usr/bin/env node\n", "/opt/node": FAILS})
    (tmp_path / "test.sh").write_text("cp /opt/n* /usr/bin\n" + CHECK.format("npm test"))
    container.begin()
    container.put({"/usr/local/bin/node": SUCCEEDS})
    found = container.verdict()
    assert (found["score"], found["set_aside"]) == (0.0, ["/usr/local/bin/node"]), found


def test_work_earns_the_reward_though_it_changed_the_container(container: Container) -> None:
    """Packages, programs and modules that the tests do not use are the agent's to change."""
    container.act(
        f"echo 4 >/app/sum; mkdir {SITE}/mine; echo >{SITE}/mine/__init__.py; touch /usr/bin/tool; "
        f"python3 -c 'import argparse, json.tool'; echo /app >{SITE}/path.pth; "
        "setsid sleep 300 >/dev/null 2>&1 </dev/null &"
    )
    found = container.verdict()
    assert (found["score"], found["set_aside"]) == (1.0, []), found
    assert set(found["tests"].values()) == {"passed"}


INSTALLED: dict[str, str | None] = {
    **HACK,
    f"{SITE}/data-1.dist-info/entry_points.txt": "[backends]\na = data\n",
    f"{SITE}/data/__init__.py": "",
    f"{SITE}/data/vendor/any-1.dist-info/entry_points.txt": "[pytest11]\na = any\n",
    f"{SITE}/old.pth": "import sys\n",
    "/usr/local/bin/pip": "#!/usr/bin/python3\n",
    f"{SITE}/pip/__init__.py": "",
    f"{SITE}/pip-1.dist-info/entry_points.txt": "[console_scripts]\npip = pip:main\n",
    "/usr/local/bin/node": "#!/usr/bin/python3\n",
}
"""What an image may have."""
UPGRADED: dict[str, str | None] = {
    **{path: f"{text}# 2\n" for path, text in INSTALLED.items()},
    f"{SITE}/data-1.dist-info/entry_points.txt": None,
    f"{SITE}/data-2.dist-info/entry_points.txt": "[backends]\na = data\n",
    f"{SITE}/old.pth": None,
    f"{SITE}/pip-1.dist-info/entry_points.txt": None,
}
"""What upgrading setuptools, pip, node and other packages leaves."""


def test_an_agent_may_upgrade_packages(container: Container) -> None:
    """Tests that use neither pip nor node are graded as before."""
    container.put(INSTALLED)
    container.begin()
    container.put(UPGRADED)
    container.act("echo 4 >/app/sum")
    found = container.verdict()
    assert (found["score"], found["set_aside"]) == (1.0, [f"{SITE}/hack.pth"]), found


WITHOUT_PYTEST = f"mkdir /opt/site; mv {SITE}/* /opt/site; mv /usr/local/bin/pytest /opt"
BRINGS_PYTEST: dict[str, str | None] = {
    "/usr/local/bin/uvx": "#!/bin/sh\nPYTHONPATH=$PYTHONPATH:/opt/site exec python3 -m $@\n",
    "/usr/local/bin/pip": f"#!/bin/sh\n[ -e {SITE}/pytest-1.dist-info ] && exit\n"
    f"cp -r /opt/site/* {SITE}; cp /opt/pytest /usr/local/bin\n",
}
"""As uv, apart from the packages of the image; and as pip, into them if it is not there."""
ADDED: dict[str, str | None] = {
    f"{SITE}/tomli/__init__.py": "",
    f"{SITE}/tomli-2.dist-info/METADATA": "",
    f"{SITE}/_pytest/__init__.py": FORGES,
    f"{SITE}/pytest/__init__.py": FORGES,
    f"{SITE}/pytest-1.dist-info/METADATA": "",
    "/usr/local/bin/pytest": "#!/bin/true\n",
}
"""Pytest, and a package that others use as well."""
OF_PYTEST = {
    *("/usr/local/bin/pytest", f"{SITE}/_pytest", f"{SITE}/pytest", f"{SITE}/pytest-1.dist-info")
}


@pytest.mark.parametrize(
    ("script", "moved"),
    [
        ("uvx.sh", OF_PYTEST),
        ("pip.sh", OF_PYTEST | {f"{SITE}/tomli", f"{SITE}/tomli-2.dist-info"}),
    ],
)
def test_an_agent_may_add_packages(script: str, moved: set[str], container: Container) -> None:
    """D19: the tests' installer brings pytest; with uv, what pytest might use may stay."""
    container.act(WITHOUT_PYTEST)
    container.put(BRINGS_PYTEST)
    container.begin()
    container.put(ADDED)
    uses = "python3 -c 'import tomli'\n" if script == "uvx.sh" else ""
    container.put({"/app/sum": "4\n", "/app/run.sh": uses})
    found = container.verdict(script)
    assert (found["score"], {*found["set_aside"]}) == (1.0, moved), found


FORGED = f"#!/usr/bin/python3\n{FORGES}"
"""A program that imitates the report of pytest."""
ENDS = "\nif [ $? -eq 0 ]; then echo 1 >/logs/verifier/reward.txt; fi\n"
VENV = f"""
uv venv .testing --offline
source .testing/bin/activate
uv run --offline pytest /tests/test_outputs.py{ENDS}"""
"""As Terminal-Bench 1 does; the pytest of the image is on the path."""
ACTIVATES = "uv() { /usr/bin/python3 /app/.testing/run.py; }\n"
PROJECT = "[project]\nname = 'mine'\nversion = '1'\nrequires-python = '>=3.9'\n"
PACKAGE = """
mkdir -p /tmp/p/DEBIAN; cd /tmp/p/DEBIAN
printf 'Package: p\\nVersion: 1\\nArchitecture: all\\nMaintainer: me <m@e>\\n' >control
echo 'Description: p' >>control
printf '#!/bin/sh\\nset -e\\n. /usr/share/debconf/confmodule\\nexec 1>&2\\n%s\\n' \
  'if [ -x /usr/sbin/policy-rc.d ]; then /usr/sbin/policy-rc.d; fi' >postinst
printf 'Template: p/a\\nType: note\\nDescription: a\\n a\\n' >templates
echo 'for one in /etc/ca-certificates/update.d/*; do [ ! -x "$one" ] || "$one"; done' >>postinst
chmod 755 postinst; dpkg-deb --build /tmp/p /opt/p.deb >/dev/null
"""
"""Makes a package whose script runs what those of ca-certificates and of services run."""
INSTALLS_PACKAGE = f"dpkg -i /opt/p.deb\npytest /tests/test_outputs.py{ENDS}"
SETUP_ATTACKS: dict[str, tuple[str, str, dict[str, str | None]]] = {
    "module-of-python": (
        f"python3 -m pytest /tests/test_outputs.py{ENDS}", "", {"/app/argparse.py": FORGES},
    ),
    "late-module-of-python": (
        f"python3 -m pytest /tests/test_outputs.py{ENDS}", "", {"/app/difflib.py": FORGES},
    ),
    "report": (
        f"python3 -m pytest /tests/test_outputs.py{ENDS}", "", {"/app/aenv_report.py": FORGES},
    ),
    "runner": (
        f"python3 -m pytest /tests/test_outputs.py{ENDS}", "", {"/app/pluggy.py": FORGES},
    ),
    "module-for-a-script": (
        f"python3 - <<<'import json'\npytest /tests/test_outputs.py{ENDS}", "",
        {"/app/json.py": FORGES},
    ),
    "environment": (
        VENV, "", {"/app/.testing/bin/activate": ACTIVATES, "/app/.testing/run.py": FORGES},
    ),
    "project": (VENV, "", {
        "/app/pyproject.toml": PROJECT,
        "/app/.venv/pyvenv.cfg": "home = /usr/bin\nversion_info = 3.11.2\n",
        "/app/.venv/bin/python": FORGED, "/app/.venv/bin/python3": FORGED,
        "/app/.venv/bin/pytest": FORGED,
    }),
    "python": (VENV, "", {"/usr/local/bin/python3.13": FORGED}),
    "debconf": (
        INSTALLS_PACKAGE, PACKAGE,
        {"/usr/share/debconf/confmodule": "/app/mine", "/app/mine": FORGED},
    ),
    "certificates": (INSTALLS_PACKAGE, PACKAGE, {"/etc/ca-certificates/update.d/mine": FORGED}),
    "services": (INSTALLS_PACKAGE, PACKAGE, {"/usr/sbin/policy-rc.d": FORGED}),
}  # fmt: skip
"""The test script, what the image has, and what the agent writes."""


def put_uv(container: Container) -> None:
    docker("cp", find_uv_bin(), f"{container.name}:/usr/local/bin/uv")


@pytest.mark.parametrize("attack", SETUP_ATTACKS)
def test_an_attack_on_what_runs_before_pytest_earns_nothing(
    attack: str, container: Container, tmp_path: Path
) -> None:
    """D19: installers and Pythons that tests run before pytest use nothing of the agent."""
    script, image, files = SETUP_ATTACKS[attack]
    (tmp_path / "test.sh").write_text(f"#!/bin/bash\n{script}")
    put_uv(container)
    container.act(image)
    container.begin()
    container.put(files)
    found = container.verdict()
    assert found["score"] == 0.0, found
    reported = found["tests"].get("test_outputs.py::test_sum")
    assert reported == "failed" or "changed what the tests rely on" in found["reason"], found


SETUPS = {
    "module": (f"python3 -m pytest /tests/test_outputs.py{ENDS}", "/app/py/__init__.py"),
    "version": (f"pytest --version\npytest /tests/test_outputs.py{ENDS}", "/app/mine"),
    "shared": (f"pytest /tests/test_outputs.py{ENDS}", "/app/packaging/version.py"),
    "solution": (f"pytest /tests/test_outputs.py{ENDS}", "/solution/attack_summary.txt"),
    "oracle": (f"pytest /tests/test_outputs.py{ENDS}", "/oracle/answer"),
    "project": (VENV, "/app/pyproject.toml"),
    "environment": (VENV, "/app/.venv/pyvenv.cfg"),
    "python": (VENV, "/usr/local/bin/python3.13"),
    "sources": (INSTALLS, "/etc/apt/sources.list.d/mine.list"),
    "service": (INSTALLS, "/etc/default/mine"),
}
"""A test script, and a file of the agent that its tests look for."""


@pytest.mark.parametrize("kind", SETUPS)
def test_work_is_there_for_the_tests(kind: str, container: Container, tmp_path: Path) -> None:
    """What is hidden from installers may be the agent's work: it is back when pytest starts."""
    script, path = SETUPS[kind]
    (tmp_path / "test.sh").write_text(f"#!/bin/bash\n{script}")
    text = PROJECT if path.endswith(".toml") else "# mine\n"
    (tmp_path / "test_outputs.py").write_text(
        "from pathlib import Path\n\ndef test_it():\n"
        f"    assert Path({path!r}).read_text() == {text!r}\n"
    )
    put_uv(container)
    container.begin()
    container.put({path: text})
    found = container.verdict()
    assert (found["score"], path in found["set_aside"]) == (1.0, False), found


def test_tests_import_modules_of_the_task_with_any_name(
    container: Container, tmp_path: Path
) -> None:
    """With ``python -m pytest``, tests import from the working directory as they always do."""
    (tmp_path / "test.sh").write_text(
        f"#!/bin/bash\npython3 -m pytest /tests/test_outputs.py{ENDS}"
    )
    (tmp_path / "test_outputs.py").write_text(
        "import statistics, work, colorsys\n\ndef test_it():\n"
        "    assert (statistics.own, work.own, work.chunk.own, colorsys.__file__[:5]) "
        "== (1, 1, 1, '/usr/')\n"
    )
    container.begin()
    container.put({
        "/app/statistics.py": "own = 1\n", "/app/work/__init__.py": "own = 1\nimport chunk\n",
        "/app/chunk.py": "own = 1\n",
    })  # fmt: skip
    found = container.verdict()
    assert found["score"] == 1.0, found


def test_a_sidecar_has_the_python_that_is_named() -> None:
    assert list(sidecar.PYTHON) == node_python.command(f"{HOME}/python")
