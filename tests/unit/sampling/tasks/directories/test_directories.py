"""Task directories: what is read, when, what is refused, and what errors name."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.sampling.runners.task_images import content_digest
from aenv_ray.sampling.tasks import archives
from aenv_ray.sampling.tasks.directories import TaskDirectories
from aenv_ray.sampling.tasks.directories.fields import FormatOptions
from aenv_ray.sampling.tasks.feed import TaskFeed, load_tasks
from aenv_ray.sampling.tasks.selection import select_tasks
from aenv_ray.trajectories.schema import ImageBuild, Task
from tests.unit.sampling.tasks.directories.task_directories import (
    HARBOR,
    TERMINAL_BENCH,
    write_task,
)

COMPOSE = """
services:
  client:
    build: {dockerfile: Dockerfile, args: {LEVEL: 3, DAY: 2024-01-31}}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${T_BENCH_TEST_DIR}", "MODE=${MODE:-fast}"]
    working_dir: /srv
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""


def load(path: Path, **options: Any) -> Task:
    return TaskDirectories.below(path, FormatOptions(**options))[0]


def test_a_terminal_bench_task_is_read_as_its_harness_does(tmp_path: Path) -> None:
    path = write_task(tmp_path / "sum", TERMINAL_BENCH, {"docker-compose.yaml": COMPOSE})
    task = load(path)
    assert (task.id, task.instruction) == ("sum", "Write 4 to /app/sum.")
    assert (task.timeout_s, task.unsupported) == (90.0, None)
    assert task.instance is not None
    assert task.instance.build is not None
    assert task.instance.build.arguments == {"LEVEL": "3", "DAY": "2024-01-31"}
    assert "solution.sh" in task.instance.build.ignored
    assert task.setup is not None
    assert task.setup.arguments == {
        "variables": {"TEST_DIR": "/tests", "MODE": "fast"},
        "directory": "/srv",
    }
    assert task.reward is not None
    assert (task.reward.arguments["verdict_by"], task.reward.arguments["timeout_s"]) == (
        "pytest",
        30,
    )
    assert [call.tool for call in task.reference] == ["upload", "execute_command"]


def test_a_recorded_solution_becomes_keystrokes(tmp_path: Path) -> None:
    commands = "- {command: vim a, min_timeout_sec: 2}\n- {command: ':q', block: true}\n"
    changes = {"solution.sh": None, "solution.yaml": commands}
    task = load(write_task(tmp_path / "sum", TERMINAL_BENCH, changes))
    assert [call.arguments for call in task.reference] == [
        {"keys": ["vim a", "Enter"], "wait_s": 2.0, "until_idle": False},
        {"keys": [":q", "Enter"], "wait_s": 900.0, "until_idle": True},
    ]


def test_a_harbor_task_is_read_as_its_harness_does(tmp_path: Path) -> None:
    limits = (
        "[environment]\ncpus = 2\nmemory = '1G'\nallow_internet = false\n"
        "[environment.env]\nMODE = 'a'\n[verifier.env]\nKEY = 'k'\n[verifier]\ntimeout_sec = 9\n"
    )
    task = load(write_task(tmp_path / "sum", HARBOR, {"task.toml": limits}))
    assert task.instance is not None
    assert (task.instance.cpu, task.instance.memory, task.instance.network) == (
        "2", "1024Mi", "none",
    )  # fmt: skip
    assert task.reward is not None
    assert task.reward.arguments == {
        "script": "test.sh",
        "verdict_by": "file",
        "timeout_s": 9.0,
        "variables": {"MODE": "a", "KEY": "k"},
    }
    assert task.reward.timeout_s == 69.0
    assert task.reference[0].archives == {"archive": (str(tmp_path / "sum" / "solution"),)}


def test_settings_that_harbor_assumes_are_supported(tmp_path: Path) -> None:
    """Root is the user here, templates have defaults, and the working directory is honoured."""
    text = (
        "[agent]\nuser = 'root'\n[verifier]\nuser = 0\n[environment]\nworkdir = '/srv'\n"
        "[environment.env]\nMODE = '${MODE:-fast}'\n[solution.env]\nKEY = '${KEY:-}'\n"
        "[verifier.env]\nTEXT = 'a ${b}'\n"
    )
    script = "# PYTHONPATH=/app pytest\nPYTHONPATH=/app:$PYTHONPATH pytest\npython3 -m pytest -E\n"
    script += "export PYTHONPATH=/app:$PYTHONPATH\npytest\nexport PYTHONPATH=\n"
    changes = {"task.toml": text, "tests/test.sh": script}
    task = load(write_task(tmp_path / "sum", HARBOR, changes))
    assert task.unsupported is None
    assert task.setup is not None
    assert task.setup.arguments == {"variables": {"MODE": "fast"}, "directory": "/srv"}
    assert task.reward is not None
    assert task.reward.arguments["variables"] == {"MODE": "fast", "TEXT": "a ${b}"}
    assert task.reference[1].arguments["variables"] == {"KEY": ""}


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("network_mode = 'public'", None),
        ("network_mode = 'no-network'", "none"),
        ("network_mode = 'public'\nallow_internet = false", None),
        ("allow_internet = false\n[verifier]\nnetwork_mode = 'no-network'", "none"),
        ("allowed_hosts = []\nos = 'Linux'\n[agent]\nnetwork_mode = 'public'", None),
    ],
)
def test_the_network_of_a_harbor_task(text: str, network: str | None, tmp_path: Path) -> None:
    """`allow_internet` is the older name of `network_mode`, and the newer one decides."""
    changes = {"task.toml": f"[environment]\n{text}\n"}
    task = load(write_task(tmp_path / "sum", HARBOR, changes))
    assert task.unsupported is None
    assert task.instance is not None
    assert task.instance.network == network


def test_a_published_image_is_not_built(tmp_path: Path) -> None:
    image = "[environment]\ndocker_image = 'ghcr.io/acme/task:1'\n"
    changes = {"task.toml": image, "environment/Dockerfile": None}
    task = load(write_task(tmp_path / "sum", HARBOR, changes))
    assert task.datasource == "ghcr.io/acme/task:1"
    assert task.instance is not None
    assert task.instance.build is None


SEVERAL = "services: {web: {image: a}, db: {image: b}}\n"


@pytest.mark.parametrize(
    ("base", "changes", "lack"),
    [
        (HARBOR, {"task.toml": "[environment]\ngpus = 2\n"}, "2 GPUs"),
        (HARBOR, {"environment/docker-compose.yaml": SEVERAL}, r"several services \(db, web\)"),
        (HARBOR, {"task.toml": "[environment]\nmcp_servers = [1]\n"}, "MCP servers"),
        (HARBOR, {"task.toml": "[[steps]]\nname = 'a'\n"}, "several steps"),
        (HARBOR,
         {"task.toml": "[[steps]]\nname = 'a'\n", "instruction.md": None, "tests/test.sh": None},
         "^the task needs several steps$"),
        (HARBOR, {"task.toml": "[agent]\nuser = 'dev'\n"}, "the user dev for its agent"),
        (HARBOR, {"task.toml": "[verifier]\nuser = 1000\n"}, "the user 1000 for its verifier"),
        (HARBOR, {"task.toml": "[environment.healthcheck]\ncommand = 'x'\n"}, "a health check"),
        (HARBOR, {"task.toml": "[environment]\nnetwork_mode = 'allowlist'\n"},
         "environment.network_mode allowlist"),
        (HARBOR, {"task.toml": "[agent]\nnetwork_mode = 'no-network'\n"},
         "agent.network_mode no-network, which is not that of its environment"),
        (HARBOR, {"task.toml": "[environment]\nos = 'windows'\n"}, "operating system windows"),
        (HARBOR, {"task.toml": "[verifier]\nenvironment_mode = 'separate'\n"},
         "a separate container"),
        (HARBOR, {"task.toml": "[verifier.environment]\ndocker_image = 'a'\n"},
         "a separate container"),
        (HARBOR, {"task.toml": "[[verifier.collect]]\ncommand = 'a'\n"}, "commands that collect"),
        (HARBOR, {"task.toml": "[agent]\nallowed_hosts = ['a.org']\n"}, "agent.allowed_hosts"),
        (HARBOR, {"task.toml": "[verifier.env]\nKEY = '${API_KEY}'\n"}, "the variable API_KEY"),
        (HARBOR, {"tests/test.sh": "PYTHONPATH=/app \\\n  pytest /tests\n"}, "PYTHONPATH"),
        (HARBOR, {"tests/test.sh": "export PYTHONPATH=/app\nuv run pytest\n"}, "PYTHONPATH"),
        (TERMINAL_BENCH, {"run-tests.sh": "unset PYTHONPATH; pytest\n"}, "PYTHONPATH"),
        (TERMINAL_BENCH, {"run-tests.sh": "python3 -I -m pytest\n"}, "PYTHONPATH"),
        (TERMINAL_BENCH, {"task.yaml": "instruction: x\nrun_tests_in_same_shell: true\n"},
         "the shell of the agent"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {build: {target: b}}}"},
         r"build\.target"),
        (TERMINAL_BENCH,
         {"docker-compose.yaml": "services: {a: {build: {dockerfile_inline: FROM a}}}"},
         r"build\.dockerfile_inline"),
        (TERMINAL_BENCH, {"docker-compose.yaml": SEVERAL}, r"several services \(db, web\)"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {image: a, privileged: true}}"},
         "privileged of its compose file"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {image: a, volumes: [/etc:/e]}}"},
         "the volume /etc:/e"),
        (TERMINAL_BENCH, {"task.yaml": "instruction: x\nparser_name: mlebench\n"}, "'mlebench'"),
    ],
)  # fmt: skip
def test_a_task_names_its_unsupported_needs(
    base: dict[str, str], changes: dict[str, str], lack: str, tmp_path: Path
) -> None:
    """It is refused and counted; the run goes on."""
    task = load(write_task(tmp_path / "sum", base, changes))
    with pytest.raises(AssertionError, match=lack):
        raise AssertionError(task.unsupported)


@pytest.mark.parametrize(
    ("command", "is_service"),
    [
        ("sleep infinity", False),
        ("[sh, -c, sleep infinity]", False),
        ("[/bin/bash, -lc, exec tail -f /dev/null]", False),
        ("[sh, -c, 'while true; do sleep 60; done']", False),
        ("/bin/bash", False),
        ("[sh, -c, 'python3 /srv/api.py & exec sleep infinity']", True),
        ("[sh, -c, /srv/start.sh]", True),
        ("python3 /srv/api.py", True),
        ("[python3, /srv/api.py, sleep 9]", True),
    ],
)
def test_a_task_whose_container_runs_a_service_is_refused(
    command: str, is_service: bool, tmp_path: Path
) -> None:
    """Its processes end before the tests, and started again it would have another state."""
    text = f"services: {{main: {{image: a, command: {command}}}}}"
    for name, base, file in (
        ("t", TERMINAL_BENCH, "docker-compose.yaml"),
        ("h", HARBOR, "environment/docker-compose.yaml"),
    ):
        refusal = load(write_task(tmp_path / name, base, {file: text})).unsupported or ""
        assert ("would not run during its tests" in refusal) is is_service, refusal


@pytest.mark.parametrize("asks", ["allow_internet = true", "network_mode = 'public'"])
def test_a_task_names_the_network_that_is_forbidden(asks: str, tmp_path: Path) -> None:
    changes = {"task.toml": f"[environment]\n{asks}\n"}
    path = write_task(tmp_path / "sum", HARBOR, changes)
    assert "AENV_ALLOW_NETWORKS" in str(load(path, may_use_internet=False).unsupported)
    silent = load(write_task(tmp_path / "silent", HARBOR), may_use_internet=False)
    assert silent.unsupported is None
    assert silent.instance is not None
    assert silent.instance.network == "none"


@pytest.mark.parametrize(
    ("base", "file", "text"),
    [
        (HARBOR, "tests/test.sh", "apt-get update\nuvx pytest /tests\n"),
        (HARBOR, "solution/solve.sh", "git clone https://example.com/a.git\n"),
        (TERMINAL_BENCH, "run-tests.sh", "source $TEST_DIR/setup-uv-pytest.sh\n"),
        (TERMINAL_BENCH, "tests/setup.sh", "curl -LsSf https://astral.sh/uv/install.sh | sh\n"),
        (TERMINAL_BENCH, "solution.sh", "pip3 install numpy\n"),
    ],
)
def test_a_task_that_downloads_needs_the_internet(
    base: dict[str, str], file: str, text: str, tmp_path: Path
) -> None:
    """Invariant 2: a network that the operator forbids fails no tests, whatever the agent did."""
    path = write_task(tmp_path / "sum", base, {file: text})
    assert load(path).unsupported is None
    refusal = str(load(path, may_use_internet=False).unsupported)
    assert f"in its {Path(file).name}, which AENV_ALLOW_NETWORKS does not allow" in refusal
    offline = write_task(tmp_path / "none", base, {file: f"# {text.splitlines()[-1]}\n"})
    assert load(offline, may_use_internet=False).unsupported is None


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (HARBOR, {"task.toml": "[agent]\ntimeout_sec = 'soon'\n"},
         r"task\.toml: agent\.timeout_sec"),
        (HARBOR, {"task.toml": "[agent\n"}, r"task\.toml: "),
        (HARBOR, {"task.toml": "[environment]\nmemory = 'much'\n"}, r"environment\.memory: 'much'"),
        (HARBOR, {"instruction.md": None}, r"instruction\.md: the file is missing"),
        (HARBOR, {"tests/test.sh": None}, r"test\.sh: the file is missing"),
        (HARBOR, {"environment/Dockerfile": None}, "Dockerfile: the file is missing"),
        (TERMINAL_BENCH, {"task.yaml": "parser_name: pytest\n"}, r"task\.yaml: instruction"),
        (TERMINAL_BENCH, {"task.yaml": "a: [\n"}, r"task\.yaml: "),
        (TERMINAL_BENCH, {"run-tests.sh": None}, r"run-tests\.sh: the file is missing"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {}}"}, "neither image nor build"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {build: ../..}}"}, "outside"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: []"}, r"compose\.yaml: services"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {image: '${A:?give A}'}}"},
         "variable A is required"),
    ],
)  # fmt: skip
def test_a_malformed_task_is_reported_with_file_and_field(
    base: dict[str, str], changes: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    """One among thousands does not end the run, in which it is counted."""
    task = load(write_task(tmp_path / "sum", base, changes))
    assert (task.id, task.reward) == ("sum", None)
    with pytest.raises(AssertionError, match=f"the task is malformed: .*{message}"):
        raise AssertionError(task.unsupported)


async def test_tasks_of_a_directory_are_read_one_at_a_time(tmp_path: Path) -> None:
    """Thousands of tasks delay no episode, and those after a broken one are played."""
    write_task(tmp_path / "set" / "a", HARBOR)
    write_task(tmp_path / "set" / "b", HARBOR, {"task.toml": "broken"})
    write_task(tmp_path / "set" / "deep" / "c", TERMINAL_BENCH)
    feed = TaskFeed(tmp_path)
    assert (feed.total, feed.known) == (3, None)
    ((_, task),) = await feed.take(1)
    assert task.id == "set/a"
    ((_, task),) = await feed.take(1)
    assert f"malformed: {tmp_path}/set/b/task.toml" in str(task.unsupported)
    ((_, task),) = await feed.take(1)
    assert (task.id, task.unsupported) == ("set/deep/c", None)
    assert await feed.take(1) == []
    assert feed.failure is None
    feed.close()


def test_tasks_are_chosen_without_reading_them(tmp_path: Path) -> None:
    for name in ("a1", "a2", "b1"):
        write_task(tmp_path / name, HARBOR, {"task.toml": "broken"} if name == "b1" else None)
    found = TaskDirectories.below(tmp_path, FormatOptions())
    chosen = select_tasks(found, ids=["a*"], shuffle=1, limit=1)
    assert [task.id for task in chosen] in (["a1"], ["a2"])
    with pytest.raises(ConfigError, match="no task has the id 'c'"):
        select_tasks(found, ids=["c"])
    assert [task.unsupported is None for task in load_tasks(tmp_path)] == [True, True, False]


def test_a_directory_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tasks"):
        load_tasks(tmp_path)


async def test_archives_are_packed_when_a_call_is_made(tmp_path: Path) -> None:
    path = write_task(tmp_path / "sum", TERMINAL_BENCH)
    task = load(path)
    assert task.reward is not None
    (path / "tests" / "more.txt").write_text("late")
    given = await archives.packed(task.reward)
    content = base64.b64decode(given["tests"])
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert sorted(tar.getnames()) == ["more.txt", "run-tests.sh", "test_outputs.py"]
    (path / "run-tests.sh").unlink()
    with pytest.raises(SandboxStartFailed, match=r"run-tests\.sh"):
        await archives.packed(task.reward)


def test_the_name_of_an_image_depends_on_its_build_context(tmp_path: Path) -> None:
    """Tests and solution are no part of it; a file that is copied into it is."""
    path = write_task(tmp_path / "sum", TERMINAL_BENCH)
    plan = ImageBuild(context=str(path), ignored=("tests", "solution.sh"))
    first = content_digest(plan)
    (path / "tests" / "test_outputs.py").write_text("changed")
    assert content_digest(plan) == first
    (path / "data.txt").write_text("1")
    assert content_digest(plan) != first


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("COPY tests/data.py /app/", ["!tests/data.py"]),
        ("copy --chmod=755 ./tests/ run-tests.sh \\\n # a comment\n  /app/",
         ["!tests", "!run-tests.sh"]),
        ('ADD ["solution.sh", "/oracle/"]', ["!solution.sh"]),
        ("COPY tests/*.py /app/", ["!tests/*.py"]),
        ("COPY --from=build tests /app/tests", []),
        ("COPY . /app\nCOPY data tests/\nRUN ls tests", []),
        ("COPY [broken", []),
    ],
)  # fmt: skip
def test_an_image_gets_the_tests_that_its_dockerfile_names(
    line: str, shown: list[str], tmp_path: Path
) -> None:
    """It could not be built without them."""
    path = write_task(tmp_path / "sum", TERMINAL_BENCH, {"Dockerfile": f"FROM a\n{line}\n"})
    task = load(path)
    assert task.instance is not None
    assert task.instance.build is not None
    ignored = task.instance.build.ignored
    assert [pattern for pattern in ignored if pattern.startswith("!")] == shown


def test_the_name_of_an_image_depends_on_the_tests_that_it_gets(tmp_path: Path) -> None:
    path = write_task(tmp_path / "sum", TERMINAL_BENCH, {"tests/data/a.txt": "1"})
    plan = ImageBuild(context=str(path), ignored=("tests", "!tests/data"))
    first = content_digest(plan)
    (path / "tests" / "test_outputs.py").write_text("changed")
    assert content_digest(plan) == first
    (path / "tests" / "data" / "a.txt").write_text("2")
    assert content_digest(plan) != first


@pytest.mark.parametrize(
    ("base", "changes", "reason"),
    [
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {image: a, command: 'a \"'}}"},
         "ValueError: No closing quotation"),
        (TERMINAL_BENCH, {"task.yaml": "instruction: x\nsince: 2024-02-31\n"}, "ValueError: day"),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {image: a, deploy: [x]}}"},
         "AttributeError: "),
        (TERMINAL_BENCH, {"docker-compose.yaml": "services: {a: {image: a, volumes: 3}}"},
         "TypeError: "),
        (HARBOR, {"task.toml": "[environment]\nmemory = 'infG'\n"}, "OverflowError: "),
    ],
)  # fmt: skip
def test_an_unreadable_task_is_refused_under_the_name_of_its_directory(
    base: dict[str, str], changes: dict[str, str], reason: str, tmp_path: Path
) -> None:
    """One directory does not end the run, however it is malformed."""
    path = write_task(tmp_path / "sum", base, changes)
    refusal = str(load(path).unsupported)
    assert refusal.startswith(f"the task is malformed: {path}: {reason}")
