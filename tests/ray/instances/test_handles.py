"""The handle: every method of it, at both densities."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.errors import (
    ConfigError,
    FileAccessError,
    FunctionFailed,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from tests.ray.faults import Witness, eventually

# --- calls ---------------------------------------------------------------------------------------


def test_a_result_comes_by_get_and_by_await(env: Any) -> None:
    """A reference of a handle is used like any other of Ray's."""
    assert ray.get(env.call_tool.remote("echo", {"text": "hi"})).text() == "hi"

    async def awaited() -> str:
        result = await env.call_tool.remote("echo", {"text": "ho"})
        return str(result.text())

    assert asyncio.run(awaited()) == "ho"


def test_a_method_of_a_handle_is_called_with_remote(env: Any) -> None:
    """Calling it directly says how to write it."""
    with pytest.raises(TypeError, match=r"\.remote\("):
        env.call_tool("echo", {"text": "hi"})


@pytest.mark.parametrize("name", ["echo", "probe@1.2.0/echo", "probe/echo"])
def test_a_tool_is_named_alone_or_with_its_environment(env: Any, name: str) -> None:
    """`tool`, `env@version/tool` and `env/tool` are the same tool."""
    assert ray.get(env.call_tool.remote(name, {"text": "hi"})).data == "hi"


def test_a_tool_of_another_environment_is_refused(env: Any) -> None:
    """A prefix that names another environment is an error with the right name in its hint."""
    with pytest.raises(ToolNotFound) as caught:
        env.call_tool.remote("other@1.0.0/echo", {"text": "hi"})
    assert "probe@1.2.0/echo" in str(caught.value.hint)


def test_list_tools_describes_them(env: Any) -> None:
    """Each tool has name, description and JSON schema; rewards and functions are not among them."""
    tools = {tool["name"]: tool for tool in ray.get(env.list_tools.remote())}
    assert tools["add"]["description"] == "Add two numbers."
    assert tools["add"]["inputSchema"]["required"] == ["a"]
    assert not {"score", "double", "health"} & set(tools)


def test_list_functions_names_functions_and_rewards(env: Any) -> None:
    """The trainer's listing has what the agent's has not."""
    listing = ray.get(env.list_functions.remote())
    assert {f["name"] for f in listing["functions"]} == {"double", "set_health", "burst"}


def test_a_tool_that_raises_is_a_result(env: Any) -> None:
    """A failing tool is data for the agent, not an exception for the trainer."""
    result = ray.get(env.call_tool.remote("fail", {"text": "no such luck"}))
    assert result.is_error
    assert "ValueError: no such luck" in result.text()


def test_call_tools_runs_in_order(make: Callable[..., Any]) -> None:
    """A batch keeps its order, in running and in results."""
    handle = make()
    results = ray.get(handle.call_tools.remote([("note", {"line": str(n)}) for n in range(20)]))
    assert len(results) == 20
    notes = ray.get(handle.read_file.remote("notes.txt")).decode().split()
    assert notes == [str(n) for n in range(20)]


def test_call_tools_runs_in_parallel(make: Callable[..., Any], witness: Witness) -> None:
    """With `parallel` all calls of a batch are under way at the same time."""
    handle = make(environment_variables=witness.variables)
    reference = handle.call_tools.remote([("hold", {"key": "go"})] * 8, parallel=True)
    witness.wait_for("began go")
    ray.get(handle.write_file.remote("go", ""))
    assert [r.data for r in ray.get(reference)] == ["held go"] * 8
    heard = witness.heard()
    assert heard.count("began go") == 8


@pytest.mark.parametrize("parallel", [False, True])
def test_call_tools_mixes_results_and_errors(env: Any, parallel: bool) -> None:
    """One bad call of a batch is an error in its place and disturbs no other."""
    calls = [
        ("echo", {"text": "a"}),
        ("nonsense", {}),
        ("add", {"a": "one"}),
        ("fail", {"text": "x"}),
        ("probe@1.2.0/add", {"a": 1}),
    ]
    first, unknown, invalid, failed, last = ray.get(env.call_tools.remote(calls, parallel=parallel))
    assert first.data == "a"
    assert isinstance(unknown, ToolNotFound)
    assert isinstance(invalid, ToolInputInvalid)
    assert failed.is_error
    assert last.data == 2


def test_call_tools_gives_what_was_ready_at_its_deadline(env: Any) -> None:
    """A batch that reaches its deadline keeps the results it has; the others are timeouts."""
    calls = [("echo", {"text": "a"}), ("block", {}), ("echo", {"text": "b"})]
    first, stuck, _ = ray.get(env.call_tools.remote(calls, timeout_s=0.5), timeout=30)
    assert first.data == "a"
    assert isinstance(stuck, ToolTimeout)


def test_an_empty_batch_is_an_empty_list(env: Any) -> None:
    """No calls, no results, no error."""
    assert ray.get(env.call_tools.remote([])) == []


def test_a_repeated_call_id_runs_once(make: Callable[..., Any]) -> None:
    """Invariant 1: the same id again returns the first outcome and runs nothing."""
    handle = make()
    results = ray.get([handle.call_tool.remote("count", call_id="one") for _ in range(5)])
    assert [r.data for r in results] == [1] * 5
    assert ray.get(handle.call_tool.remote("count")).data == 2


def test_functions_and_rewards_return_their_value(env: Any) -> None:
    """`call_function` and `call_reward` return what the code returned."""
    assert ray.get(env.call_function.remote("double", {"value": 21})) == 42
    assert ray.get(env.call_reward.remote()) == {"score": 0.5}
    assert ray.get(env.call_reward.remote({"value": 1.0})) == {"score": 1.0}
    assert ray.get(env.call_reward.remote({"value": 0.25}, name="score")) == {"score": 0.25}


@pytest.mark.parametrize("name", ["not-a-number", "raising"])
def test_a_reward_that_fails_is_never_a_number(env: Any, name: str) -> None:
    """A reward that raises or is NaN is `FunctionFailed`."""
    with pytest.raises(FunctionFailed, match=name):
        ray.get(env.call_reward.remote(name=name))


def test_a_function_that_raises_is_an_error(env: Any) -> None:
    """`FunctionFailed` carries what the function raised."""
    with pytest.raises(FunctionFailed, match="the function burst"):
        ray.get(env.call_function.remote("burst"))


def test_health_is_what_the_environment_says(make: Callable[..., Any]) -> None:
    """`check_health` returns the environment's own status."""
    handle = make()
    assert ray.get(handle.check_health.remote())["status"] == "healthy"
    ray.get(handle.call_function.remote("set_health", {"status": "poorly"}))
    assert ray.get(handle.check_health.remote())["status"] == "poorly"


def test_stream_tool_yields_progress_then_the_result(env: Any) -> None:
    """Reports come in order, the result last."""
    items = [ray.get(ref) for ref in env.stream_tool.remote("stages", {"total": 3})]
    assert items[:-1] == [(1, 3, "stage 1"), (2, 3, "stage 2"), (3, 3, "stage 3")]
    assert items[-1].data == "through"


def test_stream_tool_raises_what_call_tool_raises(env: Any) -> None:
    """A refused call is the same typed error."""
    with pytest.raises(ToolNotFound):
        [ray.get(ref) for ref in env.stream_tool.remote("nonsense")]


# --- commands and files --------------------------------------------------------------------------


def test_exec_returns_what_a_command_did(env: Any) -> None:
    """Arguments or shell text, input, variables and directory; a failing command is a result."""
    done = ray.get(env.exec.remote(["cat"], stdin=b"\x00bytes"))
    assert (done.exit_code, done.stdout) == (0, b"\x00bytes")
    done = ray.get(env.exec.remote("echo $X; pwd; echo oops >&2; exit 3", cwd="/", env={"X": "7"}))
    assert (done.exit_code, done.text(), done.stderr) == (3, "7\n/\n", b"oops\n")
    assert ray.get(env.exec.remote(["no-such-program"])).exit_code == 127


def test_exec_is_stopped_at_its_deadline(env: Any) -> None:
    """A command over its time is `ToolTimeout`, and nothing of it runs on."""
    with pytest.raises(ToolTimeout):
        ray.get(env.exec.remote("sleep 1000 & sleep 1000", timeout_s=0.3), timeout=30)

    def ended() -> bool:
        seen = ray.get(env.exec.remote("cat /proc/[0-9]*/comm"), timeout=30)
        assert b"aenv-instance\n" in seen.stdout
        return b"sleep\n" not in seen.stdout

    eventually(ended)  # a killed process is in the table until it is reaped


def test_files_are_written_read_and_listed(make: Callable[..., Any]) -> None:
    """Bytes come back as they went; ranges, appending, modes and directories work."""
    handle = make()
    data = bytes(range(256)) * 4096
    assert ray.get(handle.write_file.remote("deep/er/blob", data)) == len(data)
    assert ray.get(handle.read_file.remote("deep/er/blob")) == data
    assert ray.get(handle.read_file.remote("deep/er/blob", offset=255, length=3)) == b"\xff\x00\x01"
    ray.get(handle.write_file.remote("run.sh", "#!/bin/sh\necho ran\n", mode=0o755))
    ray.get(handle.write_file.remote("run.sh", "echo twice\n", append=True))
    assert ray.get(handle.exec.remote(["./run.sh"])).text() == "ran\ntwice\n"
    entries = {e.name: e for e in ray.get(handle.list_files.remote())}
    assert entries["deep"].type == "directory"
    assert entries["run.sh"].size_bytes == 30


def test_a_missing_file_is_a_typed_error(env: Any) -> None:
    """`FileAccessError` names the path."""
    for reference in (env.read_file.remote("no/such"), env.list_files.remote("no/such")):
        with pytest.raises(FileAccessError, match="no/such"):
            ray.get(reference)


# --- what travels --------------------------------------------------------------------------------


def test_info_counts_calls(make: Callable[..., Any]) -> None:
    """`calls` is what was answered; asking for it is none."""
    handle = make()
    ray.get([handle.call_tool.remote("count") for _ in range(7)])
    ray.get([handle.info.remote() for _ in range(3)])
    assert ray.get(handle.info.remote()).calls == 7


def test_both_densities_answer_alike(make: Callable[..., Any]) -> None:
    """The same calls give the same results and the same errors at either density."""
    pair = [make(actor="shared"), make(actor="dedicated")]
    calls: list[Callable[[Any], Any]] = [
        lambda h: h.call_tool.remote("echo", {"text": "ü\u2028\x00"}),
        lambda h: h.call_tool.remote("fail", {"text": "x"}),
        lambda h: h.call_tool.remote("nonsense"),
        lambda h: h.call_tool.remote("add", {"a": []}),
        lambda h: h.call_tools.remote([("count", {}), ("count", {})]),
        lambda h: h.list_tools.remote(),
        lambda h: h.list_functions.remote(),
        lambda h: h.call_reward.remote(name="not-a-number"),
        lambda h: h.call_function.remote("burst"),
        lambda h: h.check_health.remote(),
        lambda h: h.read_file.remote("nothing"),
    ]

    def outcome(reference: Any) -> str:
        try:
            value = repr(ray.get(reference))
        except aenv_ray.AenvError as exc:
            value = f"{exc.code}: {exc.message}"
        return re.sub(r"probe-\w{8}|'last_active': [\d.]+", "…", value)

    for call in calls:
        one, two = [outcome(call(handle)) for handle in pair]
        assert one == two


def test_a_value_that_json_cannot_carry_is_refused(env: Any) -> None:
    """Arguments are checked before anything is sent."""
    with pytest.raises(ToolInputInvalid, match="echo"):
        env.call_tool.remote("echo", {"text": object()})


@pytest.mark.parametrize("timeout", [0, -1, "60", True, float("nan")])
def test_a_timeout_is_a_number_above_zero(env: Any, timeout: Any) -> None:
    """Anything else is `ConfigError` before anything is sent."""
    with pytest.raises(ConfigError, match="timeout"):
        env.call_tool.remote("echo", {"text": "x"}, timeout_s=timeout)


def test_large_arguments_and_results_travel_whole(env: Any) -> None:
    """A megabyte each way is no special case."""
    text = "é" * 500_000
    assert ray.get(env.call_tool.remote("echo", {"text": text})).data == text


def test_results_are_json_data(env: Any) -> None:
    """What came back can be written down as JSON."""
    result = ray.get(env.call_tool.remote("surroundings", {"names": ["HOME"]}))
    assert json.loads(json.dumps(result.data)) == result.data
