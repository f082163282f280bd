"""Suites: which benchmarks a text or file names, and what is told of their episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, EpisodeStatus, Task
from aenv_ray.sampling.runners.concurrency import ConcurrencyBounds, concurrency_bounds
from aenv_ray.sampling.suites import Benchmark, read_suite, result_of


def test_names_are_separated_by_commas() -> None:
    assert [one.label for one in read_suite("mini-terminal, code@1.0.0,")] == [
        "mini-terminal",
        "code@1.0.0",
    ]


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_has_options_and_paths_relative_to_it(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"name": "mine", "version": "1.0.0"}')
    (tmp_path / "tasks.jsonl").touch()
    file = tmp_path / f"suite{suffix}"
    rows = [
        {"environment": "mine", "limit": 5},
        {"environment": "code", "name": "python", "tasks": "tasks.jsonl", "samples_per_task": 4},
    ]
    text = "".join(
        "[[benchmarks]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in row.items())
        for row in rows
    )
    file.write_text(text if suffix == ".toml" else json.dumps({"benchmarks": rows}))
    mine, python = read_suite(str(file))
    assert (mine.label, mine.environment, mine.limit) == ("mine", str(tmp_path / "mine"), 5)
    assert (python.label, python.environment) == ("python", "code")
    assert (python.tasks, python.samples_per_task) == (str(tmp_path / "tasks.jsonl"), 4)


def test_paths_and_names_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("code", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"name": "mine", "version": "1.0.0"}')
    (tmp_path / "tau2").mkdir()  # for example a clone with its tasks
    names = ["./mine", "code", "tau2", "mini-terminal", "./absent"]
    rows = [{"environment": name, "name": str(number)} for number, name in enumerate(names)]
    (tmp_path / "suite.json").write_text(json.dumps(rows))
    found = [one.environment for one in read_suite("suite.json")]
    assert found == ["./mine", "./code", "tau2", "mini-terminal", "./absent"]
    assert [one.environment for one in read_suite("mine,tau2,./absent")] == [
        "./mine",
        "tau2",
        "./absent",
    ]


@pytest.mark.parametrize(
    ("given", "least", "most"), [("16", 16, 16), ("'8-256'", 8, 256), ("[8, 256]", 8, 256)]
)
def test_a_benchmark_may_have_concurrency_bounds(
    given: str, least: int, most: int, tmp_path: Path
) -> None:
    """As `--concurrency` does, over which it takes precedence."""
    file = tmp_path / "suite.toml"
    file.write_text(f"[[benchmarks]]\nenvironment = 'a'\nconcurrency = {given}\n")
    (found,) = read_suite(str(file))
    assert found.concurrency is not None
    assert concurrency_bounds(found.concurrency) == ConcurrencyBounds(least, most)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[benchmarks]]\nlimit = 1", "benchmark 1: environment: Field required"),
        ("[[benchmarks]]\nenvironment = 'a'\nlimits = 1", "benchmark 1: limits: Extra inputs"),
        ("[[benchmarks]]\nenvironment = 'a'\nlimit = 0", "benchmark 1: limit: "),
        ("[[benchmarks]]\nenvironment = 'a'\nttl = 'soon'", "benchmark 1: ttl: "),
        ("[[benchmarks]]\nenvironment = 'a'\nepisode_timeout = '-1s'", "1: episode_timeout: "),
        ("[[benchmarks]]\nenvironment = 'a'\nconcurrency = '8-4'", "1: concurrency: concurrency"),
        ("[[benchmarks]]\nenvironment = 'a'\nconcurrency = 0", "1: concurrency: concurrency"),
        ("environment = 'a'", "has no list of benchmarks"),
        ("benchmarks = []", "has no benchmarks"),
        ("[[", "cannot be read"),
        ("[[benchmarks]]\nenvironment = 'a'\n" * 2, "two benchmarks of the suite are named 'a'"),
    ],
)
def test_an_invalid_suite_is_reported(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_suite(str(file))
    assert message in caught.value.message


def test_a_missing_suite_is_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_suite("no-such-suite.toml")


def test_void_episodes_are_counted_and_left_out_of_means() -> None:
    rewards = (1.0, None, 0.0, 1.0)
    episodes = [
        Episode(index=n, task_id=f"t{n}", status=EpisodeStatus.COMPLETED, reward=reward)
        for n, reward in enumerate(rewards)
    ]
    found = result_of(Benchmark(environment="code"), episodes, 2.0, is_complete=True)
    assert (found.episodes, found.void, found.succeeded, found.tasks) == (4, 1, 2, 4)
    assert found.reward_mean == pytest.approx(2 / 3)
    assert found.confidence_interval is not None
    assert found.confidence_interval[0] < 2 / 3 < found.confidence_interval[1]


def test_episodes_of_tasks_without_a_reward_are_not_void() -> None:
    def unscored(status: EpisodeStatus) -> Episode:
        task = Task(id="a", reward=None)
        return Episode(index=0, task_id="a", status=status, reward=None, task=task)

    episodes = [unscored(EpisodeStatus.COMPLETED), unscored(EpisodeStatus.INFRA_FAILED)]
    found = result_of(Benchmark(environment="x"), episodes, 1.0, is_complete=True)
    assert (found.episodes, found.void, found.reward_mean) == (2, 1, None)


def test_refused_episodes_are_neither_played_nor_void() -> None:
    episodes = [
        Episode(index=0, task_id="a", status=EpisodeStatus.COMPLETED, reward=1.0),
        Episode(index=1, task_id="b", status=EpisodeStatus.INFRA_FAILED, reward=None),
        Episode(index=2, task_id="c", status=EpisodeStatus.REFUSED, reward=None),
    ]
    found = result_of(Benchmark(environment="terminal-bench"), episodes, 2.0, is_complete=True)
    assert (found.tasks, found.episodes, found.void, found.refused) == (2, 2, 1, 1)
    assert (found.succeeded, found.reward_mean) == (1, 1.0)
