"""Policies by name, made once for each runner, and sent to other processes."""

from __future__ import annotations

import asyncio
import base64
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest

from aenv_ray.actors.ray_shell.pickling import pickled
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import RandomPolicy, Task
from aenv_ray.sampling.policies import base
from aenv_ray.sampling.policies.named import checked_policy, named_policy
from aenv_ray.sampling.policies.scripted import null, random_value, reference

TASK = Task(id="t", reference=({"tool": "add", "arguments": {"a": 1}},))  # type: ignore[arg-type]
TOOLS = [
    {"name": "add", "inputSchema": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}},
]


class FakeEnv:
    """Records calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def list_tools(self) -> list[dict[str, Any]]:
        return TOOLS

    async def call_tool(
        self, name: str, arguments: dict[str, Any], timeout_s: float = 60.0
    ) -> None:
        self.calls.append((name, arguments))


def play(policy: Any, task: Task = TASK) -> list[tuple[str, dict[str, Any]]]:
    env = FakeEnv()
    asyncio.run(policy(env, task))
    return env.calls


# --- by name --------------------------------------------------------------------------------------


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with modules of the user, which are forgotten after the test."""
    known = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_policy_is_found_by_module_and_by_file(own_modules: Path) -> None:
    (own_modules / "my_policy_module.py").write_text("def act(env, task): return 1\n")
    for text in ("my_policy_module:act", "my_policy_module.py:act"):
        found: Any = named_policy(text)
        assert found(None, None) == 1


class Agent:
    """A policy with a method that is one, too."""

    def __call__(self, env: Any, task: Task) -> None:
        """Do nothing."""

    act = __call__


class Named(Agent):
    """A policy that names itself."""

    name = "mine"


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("reference", "reference"), ("random:3", "random:3"), (Agent, f"{__name__}:Agent"),
        (Agent(), f"{__name__}:Agent"), (Agent().act, f"{__name__}:Agent.__call__"),
        (partial(play, None), f"{__name__}:play"), (Named, "mine"), (Named(), "mine"),
    ],
)  # fmt: skip
def test_records_name_their_policy(policy: Any, name: str) -> None:
    assert base.name_of(checked_policy(policy)) == name


def test_records_name_a_policy_as_the_command_line_does(own_modules: Path) -> None:
    (own_modules / "my_agent.py").write_text("def act(env, task): return 1\n")
    assert base.name_of(named_policy("my_agent:act")) == "my_agent:act"


def test_built_in_policies_have_names() -> None:
    assert named_policy("reference") is reference
    assert named_policy("null") is null
    assert repr(named_policy("random:7")) == "RandomPolicy(seed=7, calls=8)"


@pytest.mark.parametrize(
    "text", ["act", ":act", "m:", "no_such_module_here:act", "json:nothing", "random:x", "null:x"]
)
def test_a_policy_that_does_not_exist_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        named_policy(text)


def test_a_module_that_exits_when_it_is_imported_is_a_config_error(own_modules: Path) -> None:
    (own_modules / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match="SystemExit"):
        named_policy("exits:act")


# --- built in -------------------------------------------------------------------------------------


def test_reference_plays_the_tasks_solution_and_null_does_nothing() -> None:
    assert play(reference) == [("add", {"a": 1})]
    assert play(null) == []
    with pytest.raises(ConfigError, match="no reference solution"):
        play(reference, Task(id="t"))


def test_random_calls_depend_on_seed_and_task_only() -> None:
    calls = play(RandomPolicy(1))
    assert len(calls) == 8
    assert play(RandomPolicy(1)) == calls
    assert play(RandomPolicy(2)) != calls
    assert play(RandomPolicy(1), Task(id="other")) != calls


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 4},
        {"type": ["number", "null"]},
        {"enum": ["a", 1, None]},
        {"const": {"x": 1}},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 20, "maxLength": 21}]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        {"properties": {"a": {"properties": {"b": {"type": "string"}}, "required": ["b"]}}},
    ],
)
def test_random_arguments_match_their_schema(schema: dict[str, Any]) -> None:
    for seed in range(50):
        jsonschema.validate(random_value(schema, random.Random(seed)), schema)


# --- made once for each runner --------------------------------------------------------------------


class Counting:
    made: ClassVar[list[Counting]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.is_closed = False

    async def __call__(self, env: Any, task: Any) -> int:
        return id(self)

    async def aclose(self) -> None:
        self.is_closed = True


def test_a_class_is_instantiated_once_and_closed() -> None:
    async def runner(policy: Any) -> int:
        async with base.opened(policy) as made:
            assert base.is_async(made)
            return int(await made(None, None))

    identity = asyncio.run(runner(Counting))
    (made,) = Counting.made
    assert identity == id(made)
    assert made.is_closed
    made.is_closed = False
    assert asyncio.run(runner(made)) == id(made)
    assert not made.is_closed, "an instance that the user made may be used again"


class Raises:
    def __init__(self) -> None:
        raise OSError("no weights")

    def __call__(self, env: Any, task: Any) -> None: ...


class NeedsArguments:
    def __init__(self, path: str) -> None: ...

    def __call__(self, env: Any, task: Any) -> None: ...


class Yields:
    def __call__(self, env: Any, task: Any) -> Iterator[int]:
        yield 1


class Silent: ...


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Raises, "OSError: no weights"),
        (NeedsArguments, "without arguments.*path"),
        (Silent, "cannot be called"),
        (Yields, "is a generator"),
        (Yields(), "is a generator"),
        (partial(Yields()), "is a generator"),
        (3, "is not callable"),
    ],
)
def test_an_object_that_cannot_act_is_refused_by_name(policy: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        base.make(policy)


# --- sent to runners ------------------------------------------------------------------------------

RUNNER = """
import base64, sys
from aenv_ray.errors import ConfigError
from aenv_ray.sampling.policies import base
for line in sys.stdin:
    try:
        policy = base.make(base.received(base64.b64decode(line)))
        print(policy(None, None))
    except ConfigError as exc:
        print("ConfigError", exc.message, exc.hint)
"""


def on_a_runner(directory: Path, *policies: Any) -> str:
    """Return what another process, without the driver's modules, prints when it plays policies."""
    lines = b""
    for policy in policies:
        data = base.portable(policy)
        assert data is not None
        lines += base64.b64encode(data) + b"\n"
    program = [sys.executable, "-c", RUNNER]
    return subprocess.run(
        program, input=lines, cwd=directory, stdout=subprocess.PIPE, check=True
    ).stdout.decode()


def test_a_policy_from_a_file_beside_the_driver_can_be_sent(own_modules: Path) -> None:
    (own_modules / "agent.py").write_text(
        textwrap.dedent("""
            LIMIT = 41

            def helper():
                return LIMIT + 1

            class Agent:
                def __call__(self, env, task):
                    return helper()
        """)
    )
    elsewhere = own_modules / "elsewhere"
    elsewhere.mkdir()
    forms = [named_policy(form) for form in ("agent:Agent", "agent.py:Agent")]
    assert on_a_runner(elsewhere, *forms) == "42\n" * 2


def test_a_module_missing_on_the_runner_is_reported(own_modules: Path) -> None:
    (own_modules / "my_helpers.py").write_text("x = 1\n")
    (own_modules / "agent.py").write_text(
        "import my_helpers\ndef act(env, task): return my_helpers.x\n"
    )
    elsewhere = own_modules / "elsewhere"
    elsewhere.mkdir()
    shown = on_a_runner(elsewhere, named_policy("agent:act"))
    assert "ConfigError" in shown
    assert "my_helpers" in shown
    assert "runtime_env" in shown


def test_a_policy_that_cannot_be_pickled_stays_in_the_driver() -> None:
    lock = threading.Lock()

    def holds_a_lock(env: Any, task: Any) -> bool:
        return lock.locked()

    assert base.portable(holds_a_lock) is None


def test_a_policy_that_holds_a_mutable_container_stays_in_the_driver() -> None:
    """What the driver reads after the run must have been written in the driver."""
    seen: list[str] = []

    class Agent:
        def __init__(self) -> None:
            self.history: dict[str, int] = {}

        def __call__(self, env: Any, task: Any) -> None: ...

        def act(self, env: Any, task: Any) -> None: ...

    def notes(env: Any, task: Any) -> None:
        seen.append(task.id)

    def plain(env: Any, task: Any) -> None: ...

    assert base.portable(notes) is None
    assert base.portable(Agent()) is None
    assert base.portable(Agent().act) is None
    assert base.portable(partial(plain, x=seen)) is None
    for policy in (plain, Agent, RandomPolicy(), reference):
        assert base.portable(policy) is not None


def test_pickling_keeps_the_users_registrations(own_modules: Path) -> None:
    from ray import cloudpickle

    (own_modules / "registered.py").write_text("def act(env, task): return 1\n")
    act = named_policy("registered:act")
    cloudpickle.register_pickle_by_value(sys.modules["registered"])
    try:
        pickled(act)
        assert "registered" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules["registered"])
