"""The table of ``aenv eval``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from aenv_ray import sampling
from aenv_ray.cli.sampling.eval import _Evaluation, _prepare, show_results
from aenv_ray.cli.terminal.output import Format
from aenv_ray.errors import ConfigError
from aenv_ray.sampling.suites import Benchmark, BenchmarkResult
from aenv_ray.trajectories.statistics import PassAtK


def result(benchmark: str, **fields: Any) -> BenchmarkResult:
    known: dict[str, Any] = {
        "environment": benchmark, "tasks": 164, "episodes": 1312, "succeeded": 1200, "void": 3,
        "refused": 0, "reward_mean": 0.9142, "confidence_interval": (0.871, 0.944),
        "pass_at_k": (), "wall_s": 1391.34, "is_complete": True,
    }  # fmt: skip
    return BenchmarkResult(benchmark=benchmark, **{**known, **fields})


PASSES = tuple(PassAtK(k=1 << n, estimate=0.9 + n / 100, tasks=164) for n in range(4))


def test_a_table_of_80_columns_has_whole_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    results = [
        result("humaneval", pass_at_k=PASSES),
        result("terminal-bench", refused=10, is_complete=False),
    ]
    show_results(results, Format.TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split("  ")[0] == "BENCHMARK"
    assert lines[1].split() == [
        "humaneval", "164", "1200/1312", "0.914", "0.871..0.944", "3", "0", "1391.3", "s",
    ]  # fmt: skip
    assert lines[2].split()[2].rstrip("…") == "1200/1312", "what is cut is only that it was stopped"
    assert lines[3] == "humaneval: pass@1 0.900, pass@2 0.910, pass@4 0.920, pass@8 0.930"


def test_refused_episodes_have_a_column_if_there_are_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_results([result("code")], Format.TABLE)
    assert "REFUSED" not in capsys.readouterr().out
    show_results([result("code", refused=1)], Format.TABLE)
    assert "REFUSED" in capsys.readouterr().out


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    show_results([result("code", pass_at_k=PASSES, refused=2)], Format.JSON)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["void"], row["refused"], row["confidence_interval"]) == (3, 2, [0.871, 0.944])
    assert [one["k"] for one in row["pass_at_k"]] == [1, 2, 4, 8]


def test_a_benchmark_that_cannot_begin_is_a_result_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sample(*_: Any, **__: Any) -> Any:
        raise ConfigError("no variable is named 'A=B'", hint="rename it")

    monkeypatch.setattr(sampling, "sample", sample)
    evaluation = _Evaluation(tmp_path, force=False, quiet=True)
    evaluation.results.append(result("code"))
    assert evaluation.play(Benchmark(environment="tau2"), "null", [])
    evaluation.write()
    code, tau2 = json.loads((tmp_path / "results.json").read_text())
    assert (code["error"], tau2["episodes"], tau2["is_complete"]) == (None, 0, False)
    assert tau2["error"] == "config_error: no variable is named 'A=B' (rename it)"


def test_two_benchmarks_with_one_output_file_are_refused(tmp_path: Path) -> None:
    """Names that differ only in characters that a file name cannot have."""
    benchmarks = [Benchmark(environment="code", name=name) for name in ("code/a", "b", "code-a")]
    for force in (False, True):
        with pytest.raises(ConfigError) as raised:
            _prepare(tmp_path, benchmarks, force=force)
        assert "'code/a' and 'code-a' would both write code-a.jsonl" in raised.value.message
    _prepare(tmp_path, benchmarks[:2], force=False)
