"""Episodes of tau2: who the agent works with, what it is offered, and how it is graded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from aenv_ray.runtime.faults import Fault

Row = dict[str, Any]
Script = Callable[[Sequence[Mapping[str, Any]]], str]


def rows(tau2: ModuleType) -> dict[str, Row]:
    return {row["id"]: row for row in tau2.tasks()}


def call(tau2: ModuleType, tool: str, **arguments: Any) -> Row:
    return tau2.get_registry().tools[tool].function(**arguments)


def play(tau2: ModuleType, row: Row) -> Row:
    """Play a task's reference; return the verdict."""
    tau2.start(row, 0)
    for step in row["reference"]:
        call(tau2, step["tool"], **step["arguments"])
    return tau2.tau2_reward()


@pytest.fixture
def model(tau2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], list[Any]]:
    """Return what makes a function the operator's chat model; it returns the requests."""

    def use(script: Script) -> list[Any]:
        asked: list[Any] = []

        def complete(messages: Sequence[Mapping[str, Any]], **options: Any) -> Row:
            asked.append((list(messages), options))
            return {"choices": [{"message": {"content": script(messages)}}]}

        monkeypatch.setattr(tau2.chat_model, "is_available", lambda: True)
        monkeypatch.setattr(tau2.chat_model, "complete", complete)
        return asked

    return use


def test_without_a_model_the_tasks_need_none(tau2: ModuleType) -> None:
    assert list(rows(tau2)) == [
        "mock:solo:write", "mock:solo:press", "retail:script:0", "retail:script:1",
    ]  # fmt: skip
    assert tau2.list_cases() == list(rows(tau2))


def test_the_reference_earns_all_and_nothing_earns_nothing(tau2: ModuleType) -> None:
    for row in rows(tau2).values():
        tau2.start(row, 0)
        assert tau2.tau2_reward()["score"] == 0.0, row["id"]
        verdict = play(tau2, row)
        assert verdict["score"] == verdict["total_reward"] == 1.0, row["id"]
        assert verdict["reason"] == "agent_stop"
        assert set(verdict["rewards"]) == {"DB", "COMMUNICATE"}


def test_an_agent_that_ends_at_once_earns_what_the_official_evaluator_says(
    tau2: ModuleType,
) -> None:
    scores = {}
    for name, row in rows(tau2).items():
        tau2.start(row, 0)
        tau2.tau2_done()
        scores[name] = tau2.tau2_reward()["score"]
    # Task 1 of retail expects nothing.
    assert [name for name, score in scores.items() if score] == ["retail:script:1"]


def test_tools_are_those_of_the_task(tau2: ModuleType) -> None:
    tau2.start({"id": "mock:solo:press"}, 0)
    solo = set(tau2.get_registry().tools)
    assert {"press_button", "mock_write_note", "tau2_done"} <= solo
    assert "tau2_send_message" not in solo
    tau2.start({"id": "retail:script:0"}, 0)
    tools = tau2.get_registry().tools
    assert {"retail_write_note", "tau2_send_message", "tau2_get_status"} <= set(tools)
    assert not {"press_button", "mock_write_note"} & set(tools)
    schema = tools["retail_write_note"].mcp_tool()["inputSchema"]
    assert schema["required"] == ["key", "text"]
    assert [one["function"]["name"] for one in tau2.tau2_get_available_tools()] == [
        "read_note", "retail_write_note", "calculate",
    ]  # fmt: skip


def test_what_a_tool_raises_is_an_observation(tau2: ModuleType) -> None:
    tau2.start({"id": "mock:solo:write"}, 0)
    answer = call(tau2, "read_note", key="missing")
    assert answer["observation"].startswith("Error")
    assert answer | {"observation": ""} == {
        "observation": "", "reward": 0.0, "done": False, "step": 1,
    }  # fmt: skip


def test_an_ended_episode_takes_no_action_and_keeps_its_verdict(tau2: ModuleType) -> None:
    row = rows(tau2)["mock:solo:write"]
    verdict = play(tau2, row)
    with pytest.raises(ValueError, match="has ended"):
        call(tau2, "mock_write_note", key="b", text="other")
    assert tau2.tau2_reward() == verdict
    assert tau2.tau2_done()["done"]


def test_a_reset_leaves_nothing_of_the_last_episode(tau2: ModuleType) -> None:
    row = rows(tau2)["mock:solo:write"]
    assert play(tau2, row)["score"] == 1.0
    tau2.start(row, 1)
    assert call(tau2, "read_note", key="b")["observation"].startswith("Error")
    tau2.tau2_done()
    assert tau2.tau2_reward()["score"] == 0.0


def test_information_does_not_show_what_is_expected(tau2: ModuleType) -> None:
    tau2.start({"id": "retail:script:0"}, 0)
    shown = json.dumps([tau2.tau2_get_task_info(), tau2.tau2_get_system_prompt()])
    assert "retail_write_note" in shown  # as a tool
    assert "four" not in shown
    tau2.start({"id": "mock:solo:write"}, 0)
    assert tau2.tau2_get_task_info()["ticket"] == "Write two to b."


@pytest.mark.parametrize("expression", ["9**9**9", "9* *9", "1+" * 600 + "1"])
def test_an_expression_cannot_keep_the_interpreter_busy(tau2: ModuleType, expression: str) -> None:
    tau2.start({"id": "mock:solo:write"}, 0)
    with pytest.raises(ValueError, match="no powers"):
        call(tau2, "calculate", expression=expression)
    assert call(tau2, "calculate", expression="2 * 3")["observation"] == "6"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mock:solo:nothing", ["unknown task", "write"]),
        ("mock:solo:tell", ["solo", "needs a user"]),
        ("space:solo:x", ["unknown domain", "mock, retail"]),
        ("retail:solo:0", ["no mode 'solo'", "model, script"]),
        ("retail:model:0", ["chat model", "AENV_CHAT_MODEL_URL"]),
        ("retail:script:2", ["judge", "AENV_CHAT_MODEL"]),
        ("0", ["a task has an id such as"]),
    ],
)
def test_a_task_that_cannot_be_played_says_why(
    tau2: ModuleType, name: str, words: list[str]
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        tau2.start({"id": name}, 0)
    for word in words:
        assert word in str(raised.value)


def test_a_simulated_user_talks_and_ends_the_episode(
    tau2: ModuleType, model: Callable[[Script], list[Any]]
) -> None:
    said = iter(["Please write d.", "Thank you. ###STOP###"])
    asked = model(lambda _: next(said))
    row = rows(tau2)["retail:model:0"]
    tau2.start(row, 7)
    assert tau2.tau2_get_status()["last_observation"] == "Please write d."
    call(tau2, "retail_write_note", key="d", text="four")
    last = call(tau2, "tau2_send_message", message="It is written: four.")
    assert last["done"]
    verdict = tau2.tau2_reward()
    assert (verdict["score"], verdict["reason"]) == (1.0, "user_stop")
    messages, options = asked[0]
    assert "Have d written: four." in messages[0]["content"]
    assert options == {"temperature": 0.0, "seed": 7}


def test_a_model_judges_assertions(tau2: ModuleType, model: Callable[[Script], list[Any]]) -> None:
    for met in (True, False):
        model(lambda _, met=met: json.dumps({"met": met}))
        verdict = play(tau2, rows(tau2)["retail:script:2"])
        assert verdict["rewards"] == {"DB": 1.0, "NL_ASSERTION": float(met)}
        assert verdict["score"] == float(met)


def test_a_user_that_fails_is_no_verdict(
    tau2: ModuleType, model: Callable[[Script], list[Any]]
) -> None:
    """Invariant 2: a failure of the endpoint never becomes a reward."""

    def say(messages: Sequence[Mapping[str, Any]]) -> str:
        if len(messages) > 2:
            raise Fault("endpoint_unavailable", "it is down")
        return "Please write d."

    model(say)
    tau2.start({"id": "retail:model:0"}, 0)
    with pytest.raises(Fault, match="it is down"):
        call(tau2, "tau2_send_message", message="Hello?")
    with pytest.raises(Fault) as raised:
        tau2.tau2_reward()
    assert raised.value.code == "endpoint_unavailable"


def test_variables_name_a_task_as_in_aenvironment(
    tau2: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tau2, "_episode", None)
    monkeypatch.setenv("TAU2_DOMAIN", "mock")
    monkeypatch.setenv("TAU2_TASK_ID", "write")
    tau2._from_variables()
    assert tau2.tau2_get_task_info()["task_id"] == "write"
    call(tau2, "mock_write_note", key="b", text="two")
    done = tau2._done_with_reward()
    assert (done["done"], done["total_reward"], done["steps"]) == (True, 1.0, 2)
    monkeypatch.setenv("TAU2_USER_LLM_API_KEY", "secret")
    with pytest.raises(RuntimeError, match="AENV_CHAT_MODEL_KEY_ENV") as raised:
        tau2._from_variables()
    assert "secret" not in str(raised.value)
    monkeypatch.setattr(tau2, "_named", None)
