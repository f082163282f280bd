"""NeMo RL: a double of its interface and of torch, as documented in August 2026."""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

import aenv_ray.integrations
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Task
from tests.fixtures.doc_blocks import doc_blocks
from tests.fixtures.listed_tools import TREE
from tests.unit.integrations.fakes import CALL, FakeEpisode

TRAINERS = Path(__file__).resolve().parents[3] / "examples" / "integrations" / "trainers"


class Returned(NamedTuple):
    """As ``EnvironmentReturn``."""

    observations: list[dict[str, str]]
    metadata: list[Any]
    next_stop_strings: list[Any]
    rewards: Any
    terminateds: Any
    answers: Any


class Numbers(list):  # type: ignore[type-arg]
    """As far as needed, a tensor."""

    def __mul__(self, other: Any) -> Numbers:
        return Numbers(one * two for one, two in zip(self, other, strict=True))


class Interface:
    """As ``EnvironmentInterface``, which is generic."""


class Blocking:
    """`FakeEpisode` without ``await``."""

    def __init__(self, episode: FakeEpisode) -> None:
        self._episode = episode
        self.env_name = episode.env_name
        self.instance_id = "fake-1" if episode.has_begun else None

    def submit(self, *_: Any) -> Any: ...

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            coroutine = getattr(self._episode, name)(*arguments, **options)
            try:
                coroutine.send(None)
            except StopIteration as ended:
                return ended.value
            raise AssertionError("it waits")

        return call


class Pool:
    def __init__(self, *episodes: FakeEpisode) -> None:
        self.left = list(episodes)
        self.tasks: list[Any] = []
        self.is_closed = False

    def begin_blocking(self, task: Any) -> Blocking:
        self.tasks.append(task)
        return Blocking(self.left.pop(0))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def nemo_rl(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, environments = ModuleType("nemo_rl"), ModuleType("nemo_rl.environments")
    interfaces, torch = ModuleType("nemo_rl.environments.interfaces"), ModuleType("torch")
    interfaces.EnvironmentInterface = Interface  # type: ignore[attr-defined]
    interfaces.EnvironmentReturn = Returned  # type: ignore[attr-defined]
    torch.tensor = lambda values, dtype=None: Numbers(values)  # type: ignore[attr-defined]
    torch.float32 = torch.bool = None  # type: ignore[attr-defined]
    for module in (package, environments, interfaces, torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.5.0" if name == "nemo-rl" else version(name)
    )
    monkeypatch.delitem(sys.modules, "aenv_ray.integrations.nemo_rl", raising=False)
    return importlib.import_module("aenv_ray.integrations.nemo_rl")


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Add."}, {"role": "assistant", "content": text}]


def environment(nemo_rl: Any, *episodes: FakeEpisode) -> tuple[Any, Pool]:
    made = nemo_rl.EpisodeBatches({"environment": "fake", "max_turns": 3})
    pool = made._pool = Pool(*episodes)
    return made, pool


def test_a_batch_of_episodes_is_played(nemo_rl: Any) -> None:
    made, pool = environment(nemo_rl, FakeEpisode(), FakeEpisode())
    given = [{"aenv": {"id": "a"}}, {"aenv": {"id": "b"}}]
    first = made.step([said(CALL), said("I know it.")], given)
    assert first.observations[0]["role"] == "environment"
    assert "<tool_response>\n2" in first.observations[0]["content"]
    assert (list(first.rewards), list(first.terminateds)) == ([0.0, 0.5], [False, True])
    assert sorted(task["id"] for task in pool.tasks) == ["a", "b"]
    second = made.step([said("Done.")], first.metadata[:1])
    assert (list(second.rewards), list(second.terminateds)) == ([0.5], [True])
    made.shutdown()
    assert pool.is_closed


def test_void_episodes_are_out_of_the_loss(nemo_rl: Any) -> None:
    made, _ = environment(nemo_rl, FakeEpisode(is_lost=True), FakeEpisode())
    ended = made.step([said(CALL), said("Done.")], [{}, None])
    assert list(ended.terminateds) == [True, True]
    assert list(ended.rewards) == [0.0, 0.5]
    batch = {"extra_env_info": ended.metadata, "loss_multiplier": Numbers([1.0, 1.0])}
    kept, metrics = made.global_post_process_and_metrics(batch)
    assert list(kept["loss_multiplier"]) == [0.0, 1.0]
    assert metrics == {"aenv/void": 0.5}
    made.shutdown()


def test_a_schema_that_contains_itself_is_refused(nemo_rl: Any) -> None:
    made, _ = environment(nemo_rl, FakeEpisode(schema=TREE))
    with pytest.raises(ConfigError, match="contains itself"):
        made.step([said(CALL)], [{}])
    made.shutdown()


def test_the_docs_register_and_configure_it(nemo_rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, str]] = []
    utils = ModuleType("nemo_rl.environments.utils")
    utils.register_env = lambda *names: registered.append(names)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    exec(doc_blocks("nemo-rl")[0], {})
    [(name, path)] = registered
    module, _, attribute = path.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is nemo_rl.AenvEnvironment
    [text] = doc_blocks("nemo-rl", "yaml")
    made = nemo_rl.EpisodeBatches(yaml.safe_load(text)["env"][name])
    assert made._pool.env_name == "mini-terminal"
    made.shutdown()


def test_the_example_has_rows_that_are_played(
    nemo_rl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[tuple[str, str]] = []
    utils = ModuleType("nemo_rl.environments.utils")
    utils.register_env = lambda *names: registered.append(names)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(nemo_rl, "instructions", lambda environment: f"Tools of {environment}.")
    monkeypatch.setattr(aenv_ray.integrations, "nemo_rl", nemo_rl, raising=False)
    example = runpy.run_path(str(TRAINERS / "nemo_rl_rows.py"))
    example["register"]()
    assert registered == [("aenv", "aenv_ray.integrations.nemo_rl.AenvEnvironment")]
    [row] = example["rows"]("fake", [Task(id="add", instruction="Add.")])
    assert [m["content"] for m in row["message_log"]] == ["Tools of fake.", "Add."]
    made, pool = environment(nemo_rl, FakeEpisode())
    made.step([[*row["message_log"], *said("Done.")]], [row["extra_env_info"]])
    assert pool.tasks == [{"id": "add", "instruction": "Add."}]
    made.shutdown()


def test_it_is_an_actor_for_ray(nemo_rl: Any) -> None:
    assert hasattr(nemo_rl.AenvEnvironment, "remote")


@pytest.mark.parametrize("installed", [None, "0.0.0"])
def test_the_package_on_pypi_is_not_it(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", found)
    monkeypatch.delitem(sys.modules, "aenv_ray.integrations.nemo_rl", raising=False)
    with pytest.raises(ConfigError, match=r"nemo-rl>=0\.1") as caught:
        importlib.import_module("aenv_ray.integrations.nemo_rl")
    assert "github.com" in str(caught.value.hint)
