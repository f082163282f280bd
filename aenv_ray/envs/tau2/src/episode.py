"""One episode: tau2-bench's orchestrator, driven by the agent's calls instead of by its model."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import UTC, datetime
from typing import Any, Final

import bench
import chat_module
from bench import Case, Mode
from tau2.agent.base_agent import HalfDuplexAgent
from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, UserMessage
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator, Role
from tau2.user.user_simulator import DummyUser, UserSimulator

from aenv_ray.runtime.faults import Fault

STOP: Final = "###STOP###"
"""With this text an agent ends the conversation, as tau2-bench's solo agent does."""
MAX_STEPS: Final = 200
"""Messages of an episode; tau2-bench's own limit for its command line."""
_SCRIPTED: Final = "That is all that I can tell you. Please do what you can, and then end this."
_MAX_EXPRESSION: Final = 1000
_MAX_MESSAGE: Final = 20_000
"""Characters: an agent could otherwise have its user's model fail, and with it the episode."""


class GymAgent(HalfDuplexAgent):  # type: ignore[type-arg]
    """An agent whose next message was given before; the orchestrator knows it by this name."""

    def __init__(self, tools: list[Any], policy: str) -> None:
        super().__init__(tools=tools, domain_policy=policy)
        self.pending: AssistantMessage | None = None

    def get_init_state(self, message_history: list[Any] | None = None) -> list[Any]:
        """Return a state, which is not used."""
        return message_history or []

    def generate_next_message(self, message: Any, state: Any) -> tuple[AssistantMessage, Any]:
        """Return the message that was given."""
        del message
        given, self.pending = self.pending, None
        assert given is not None, "the orchestrator asked before the agent acted"
        return given, state

    @classmethod
    def is_stop(cls, message: AssistantMessage) -> bool:
        """Return whether a message ends the conversation."""
        return not message.is_tool_call() and STOP in (message.content or "")

    def set_seed(self, seed: int) -> None:
        """Do nothing: the agent is elsewhere."""

    def stop(self, message: Any = None, state: Any = None) -> None:
        """Do nothing."""


class ScriptedUser(UserSimulator):  # type: ignore[type-arg]
    """A user who tells the scenario in the first message, and no more afterwards."""

    def __init__(self, scenario: str) -> None:
        super().__init__(llm="script", instructions=scenario)
        self._has_spoken = False

    def _generate_next_message(self, message: Any, state: Any) -> UserMessage:
        del message, state
        text = _SCRIPTED if self._has_spoken else str(self.instructions)
        self._has_spoken = True
        return UserMessage(role="user", content=text)


class Episode:
    """The state of one episode. Thread-safe.

    Args:
        case: What to solve, and with whom.
        seed: The seed of the simulated user.

    Raises:
        Fault: The simulated user cannot be asked.
    """

    def __init__(self, case: Case, seed: int | None = None) -> None:
        self.case = case
        self._lock = threading.Lock()
        self._is_solo = case.mode is Mode.SOLO
        self.environment = bench.environment(case.domain, is_solo=self._is_solo)
        self._agent = GymAgent([], self.environment.get_policy())
        self._orchestrator = Orchestrator(
            domain=case.domain,
            agent=self._agent,
            user=self._user(),
            environment=self.environment,
            task=case.task,
            max_steps=MAX_STEPS,
            seed=seed if case.mode is Mode.MODEL else None,
            solo_mode=self._is_solo,
        )
        # As `Orchestrator.run` begins; the record of a run needs them.
        self._orchestrator._run_start_perf = time.perf_counter()
        self._orchestrator._run_start_time = datetime.now(UTC).isoformat()
        self._is_begun = False
        self._failure: Exception | None = None
        self._result: dict[str, Any] | None = None
        self.actions = 0
        if not self._is_solo:  # in solo mode the orchestrator begins with the agent's first message
            self._advance()

    def _user(self) -> Any:
        if self._is_solo:
            return DummyUser()
        scenario = str(self.case.task.user_scenario)
        if self.case.mode is Mode.SCRIPT:
            return ScriptedUser(scenario)
        try:
            tools = self.environment.get_user_tools()
        except ValueError:  # the user of this domain has none
            tools = None
        return UserSimulator(
            llm=chat_module.USER_MODEL,
            instructions=scenario,
            tools=tools,
            llm_args={"temperature": 0.0},
        )

    # --- acting ---------------------------------------------------------------------------------

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool of the domain; what it raises is an observation.

        Raises:
            ValueError: The episode has ended, or the expression to calculate is too large.
        """
        if name == "calculate":
            _check_expression(str(arguments.get("expression", "")))
        call = ToolCall(id=f"call_{uuid.uuid4().hex[:12]}", name=name, arguments=arguments)
        return self._act(AssistantMessage(role="assistant", content=None, tool_calls=[call]))

    def say(self, text: str) -> dict[str, Any]:
        """Send the user a message, and return the answer.

        Raises:
            ValueError: The episode has ended, or the text is empty or too long.
        """
        if not text.strip() or len(text) > _MAX_MESSAGE:
            raise ValueError(f"a message has 1 to {_MAX_MESSAGE} characters, not {len(text)}")
        return self._act(AssistantMessage(role="assistant", content=text))

    def finish(self) -> dict[str, Any]:
        """End the episode, as the agent; has no effect if it has ended."""
        if not self.is_done:
            self._act(AssistantMessage(role="assistant", content=STOP))
        return self.status()

    def _act(self, message: AssistantMessage) -> dict[str, Any]:
        with self._lock:
            self._check_sound()
            if self.is_done:
                raise ValueError(f"the episode has ended ({self.termination})")
            self._agent.pending = message
            self.actions += 1
            self._advance()
        return self.observed()

    def _advance(self) -> None:
        """Let user and environment act until it is the agent's turn."""
        one = self._orchestrator
        try:
            if not self._is_begun:
                one.initialize()
                self._is_begun = True
            while not one.done and not (one.to_role is Role.AGENT and self._agent.pending is None):
                one.step()
                one._check_termination()
        except Fault as exc:  # of the chat model
            self._failure = exc
            raise
        except BaseException as exc:
            why = f"{type(exc).__name__}: {exc}"
            self._failure = RuntimeError(f"the episode cannot continue: {why}")
            raise

    def _check_sound(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- looking --------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether the episode has ended."""
        return bool(self._orchestrator.done)

    @property
    def termination(self) -> str | None:
        """Why it ended; None while it continues."""
        reason = self._orchestrator.termination_reason
        return None if reason is None else str(reason.value)

    @property
    def observation(self) -> str:
        """What the agent sees: the last message of the user or of a tool, or the ticket."""
        message = self._orchestrator.message
        if message is None:
            return str(self.case.task.ticket or "")
        if isinstance(message, MultiToolMessage):
            return "\n".join(str(one.content) for one in message.tool_messages)
        return "" if isinstance(message, AssistantMessage) else str(message.content or "")

    def observed(self) -> dict[str, Any]:
        """Return what an action returns; the reward is known only after the end."""
        return {
            "observation": self.observation,
            "reward": 0.0,
            "done": self.is_done,
            "step": self.actions,
        }

    def status(self) -> dict[str, Any]:
        """Return how far the episode is."""
        return {
            "step": self.actions,
            "max_steps": MAX_STEPS,
            "done": self.is_done,
            "termination_reason": self.termination,
            "last_observation": self.observation,
        }

    # --- grading --------------------------------------------------------------------------------

    def grade(self) -> dict[str, Any]:
        """Return the verdict of tau2-bench's evaluator; an episode that has not ended earns none.

        Raises:
            Fault: The model that judges assertions cannot be asked.
            RuntimeError: The episode cannot continue: tau2-bench raised, or could not use the
                answers of the chat model.
        """
        with self._lock:
            self._check_sound()
            if self._result is None or not self._result["done"]:
                self._result = self._graded()
            return self._result

    def _graded(self) -> dict[str, Any]:
        known = {"done": self.is_done, "steps": self.actions, "reason": self.termination}
        if not self.is_done:
            return {"score": 0.0, "total_reward": 0.0, "rewards": {}, **known,
                    "reason": "the agent did not end the episode"}  # fmt: skip
        run = self._orchestrator._finalize()
        verdict = evaluate_simulation(
            simulation=run,
            task=self.case.task,
            evaluation_type=EvaluationType.ALL,
            solo_mode=self._is_solo,
            domain=self.case.domain,
        )
        info = verdict.model_dump(mode="json")
        return {
            "score": float(verdict.reward),
            "total_reward": float(verdict.reward),
            "rewards": info.get("reward_breakdown") or {},
            **known,
            "reward_info": info,
        }


def _check_expression(text: str) -> None:
    """Refuse what would keep the interpreter busy: tau2-bench evaluates it as Python.

    Raises:
        ValueError: It has a power, or is too long.
    """
    if "**" in text.replace(" ", "") or len(text) > _MAX_EXPRESSION:
        raise ValueError(
            f"expressions have no powers and at most {_MAX_EXPRESSION} characters: {text[:60]}"
        )
