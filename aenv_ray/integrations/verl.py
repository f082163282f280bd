"""An agent loop and a tool for verl.

Where aenv-ray is installed, verl finds the agent loop ``aenv`` as a plug-in. A row of the dataset
chooses it, and has the task of the episode:

    {"agent_name": "aenv", "prompt": […],
     "extra_info": {"aenv": {"environment": "mini-terminal", "task": {"id": …, "reward": …}}}}

For options, name the class in the file of ``rollout.agent.agent_loop_config_path``:

    - name: terminal
      _target_: aenv_ray.integrations.verl.AenvAgentLoop
      environment: mini-terminal
      options: {out: episodes}

All workers write their records into that directory.

The reward is that of the environment. A void trajectory has an empty response mask, which takes it
out of the loss, and ``aenv_void``. ``algorithm.adv_estimator=grpo_without_void`` also takes it out
of the mean of its group.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import math
import weakref
from collections.abc import Collection, Mapping
from typing import Any, Final

from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.episodes import EpisodeOutcome, EpisodePool, LiveEpisode, shared_pool
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.schemas import flat_parameters
from aenv_ray.integrations.support.token_loop import task_of_column
from aenv_ray.integrations.support.tools import (
    EnvironmentTools,
    FrameworkTool,
    framework_tools,
    images,
    model_text,
)
from aenv_ray.models import ToolResult
from aenv_ray.trajectories.schema import Generation

require("verl", "verl", "0.9", "1")

from verl.experimental.agent_loop.agent_loop import (  # noqa: E402
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)
from verl.experimental.agent_loop.tool_agent_loop import (  # noqa: E402
    AgentData,
    AgentState,
    ToolAgentLoop,
)
from verl.tools.base_tool import BaseTool  # noqa: E402
from verl.tools.function_tool import FunctionTool  # noqa: E402
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse  # noqa: E402
from verl.trainer.ppo.core_algos import (  # noqa: E402
    compute_grpo_outcome_advantage,
    register_adv_est,
)

ROW: Final = "aenv"
"""Key of ours in the ``extra_info`` and in the ``tools_kwargs`` of a row."""
VOID: Final = "aenv_void"
"""Extra field of a trajectory: whether nothing can be learned from it."""


@register("aenv")
class AenvAgentLoop(ToolAgentLoop):
    """An episode of an environment, by verl's loop of tool calls.

    Environments with the same name and options share a pool in each worker.

    Args:
        args: What verl passes.
        environment: ``name@version``, ``name``, or the path of a project. None: that of the row.
        only: Names of the tools to offer. None: all.
        void_retries: How often a void episode is played again.
        options: The options of the `EpisodePool`.
        kwargs: What verl passes.
    """

    def __init__(
        self,
        *args: Any,
        environment: str | None = None,
        only: Collection[str] | None = None,
        void_retries: int = 1,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._environment = environment
        self._only = None if only is None else list(only)
        self._void_retries = void_retries
        self._options = dict(options or {})
        self._has_ended = False

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play an episode; verl calls this for each sample of a row.

        Raises:
            ConfigError: The row or an option is wrong.
        """
        given = dict((row.get("extra_info") or {}).get(ROW) or {})
        environment = given.get("environment", self._environment)
        if environment is None:
            raise ConfigError(
                "the row names no environment",
                hint=f'extra_info={{"{ROW}": {{"environment": "name@version"}}}}',
            )
        pool = shared_pool(environment, **self._options)
        task = task_of_column(given.get("task"))
        output, outcome = await self._attempt(pool, task, sampling_params, row)
        for _ in range(self._void_retries):
            if not outcome.is_void:
                break
            output, outcome = await self._attempt(pool, task, sampling_params, row)
        return output

    async def _attempt(
        self,
        pool: EpisodePool,
        task: Mapping[str, Any],
        sampling_params: dict[str, Any],
        row: dict[str, Any],
    ) -> tuple[AgentLoopOutput, EpisodeOutcome]:
        episode = await pool.begin(task)
        try:
            return await self._played(episode, sampling_params, row)
        except BaseException:
            await asyncio.shield(episode.abandon())
            raise

    async def _played(
        self, episode: LiveEpisode, sampling_params: dict[str, Any], row: dict[str, Any]
    ) -> tuple[AgentLoopOutput, EpisodeOutcome]:
        ours = EnvironmentTools(episode, only=self._only)
        self._has_ended = False
        try:
            offered = await ours.load()
        except ConfigError:
            raise
        except AenvError:  # the outcome of the episode says what it is worth
            output = await self._unplayed(row)
            outcome = await episode.finish()
        else:
            self._offer(ours, offered)
            output = await super().run(sampling_params, **row)
            fields = output.extra_fields
            for version in (fields.get("min_global_steps"), fields.get("max_global_steps")):
                if version is not None:
                    await episode.record_policy_version(int(version))
            outcome = await episode.finish(_generation(output))
        output.reward_score = outcome.reward or 0.0
        output.extra_fields |= {VOID: outcome.is_void, "aenv_status": outcome.episode.status.value}
        if outcome.is_void:
            output.response_mask = [0] * len(output.response_mask)
        return output, outcome

    def _offer(self, ours: EnvironmentTools, offered: list[FrameworkTool]) -> None:
        """Give verl's loop the tools: the model sees whole schemas, verl's parsers flat ones."""
        self.tools = {
            tool.name: FunctionTool(
                name=tool.name, fn=functools.partial(self._call, ours, tool.name),
                tool_schema=_schema(tool), is_async=True,
            )
            for tool in offered
        }  # fmt: skip
        self.tool_schemas = [
            {
                "type": "function",
                "function": {
                    "name": tool.name, "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in offered
        ]  # fmt: skip

    async def _call(self, ours: EnvironmentTools, name: str, /, **arguments: Any) -> ToolResponse:
        try:
            result = await ours.call(name, arguments)
        except AenvError:
            self._has_ended = True  # the outcome of the episode says what it is worth
            raise
        return _response(result, with_images=self.processor is not None)

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        return AgentState.TERMINATED if self._has_ended else state

    async def _unplayed(self, row: dict[str, Any]) -> AgentLoopOutput:
        """Return a trajectory of one token, since verl's batches have no empty ones."""
        end = self.tokenizer.eos_token_id or 0
        return AgentLoopOutput(
            prompt_ids=await self.ct_build_initial_tokens(list(row["raw_prompt"])),
            response_ids=[end], response_mask=[0],
            response_logprobs=[0.0] if self.rollout_config.calculate_log_probs else None,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [], "tool_rewards": []},
        )  # fmt: skip


def _generation(output: AgentLoopOutput) -> Generation:
    """Return the tokens for the record, which cannot hold a log-probability that is not finite."""
    logprobs = output.response_logprobs
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        logprobs = None
    return Generation(
        prompt_ids=tuple(output.prompt_ids), response_ids=tuple(output.response_ids),
        response_mask=tuple(output.response_mask),
        logprobs=None if logprobs is None else tuple(logprobs),
    )  # fmt: skip


def _schema(tool: FrameworkTool) -> OpenAIFunctionToolSchema:
    """Return the schema of a tool as verl's classes express it: without nesting."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": flat_parameters(tool.parameters),
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _response(result: ToolResult, *, with_images: bool) -> ToolResponse:
    shown = images(result) if with_images else []
    if not shown:
        return ToolResponse(text=model_text(result))
    import PIL.Image  # verl needs it for models that see

    decoded = [PIL.Image.open(io.BytesIO(base64.b64decode(data))) for _, data in shown]
    return ToolResponse(text=result.text(), image=decoded)


@register_adv_est("grpo_without_void")
def grpo_without_void(
    token_level_rewards: Any, response_mask: Any, index: Any, config: Any = None, **others: Any
) -> tuple[Any, Any]:
    """Compute GRPO's advantages as verl does, without trajectories whose mask is empty.

    For ``algorithm.adv_estimator``. Theirs are 0, and they are in no mean of a group.
    """
    del others
    kept = response_mask.sum(dim=-1) > 0
    advantages = token_level_rewards.new_zeros(token_level_rewards.shape)
    by_deviation = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    advantages[kept] = compute_grpo_outcome_advantage(
        token_level_rewards[kept], response_mask[kept], index[kept.cpu().numpy()],
        norm_adv_by_std_in_grpo=by_deviation,
    )[0]  # fmt: skip
    return advantages, advantages


_episodes: weakref.WeakKeyDictionary[AgentData, dict[EpisodePool, asyncio.Task[LiveEpisode]]] = (
    weakref.WeakKeyDictionary()
)
"""The episodes of `AenvTool`, by trajectory."""


class AenvTool(BaseTool):
    """One tool of an environment for verl's own loop, ``tool_agent``.

    verl begins and ends a tool with each call. So the tools of an environment share an episode,
    which begins with the first call of a trajectory, and ends once the trajectory does. verl does
    not ask it for a reward: that is the reward function of the training, or use `AenvAgentLoop`.

        tools:
          - class_name: aenv_ray.integrations.verl.AenvTool
            config: {type: native, environment: mini-terminal, tool: execute_command}

    A row may have a task under ``tools_kwargs["aenv"]["task"]``.

    Args:
        config: ``environment``, ``tool``, and ``options`` of the `EpisodePool`.
        tool_schema: None: that of the environment.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        self._pool = shared_pool(config["environment"], **config.get("options", {}))
        listed = self._pool.list_tools()
        [tool] = framework_tools(listed, self._pool.env_name, only=[config["tool"]])
        self._listed = listed
        self._own_name = config["tool"]
        super().__init__(config, tool_schema or _schema(tool))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the tool in the episode of a trajectory.

        Raises:
            AenvError: The episode is over; the trajectory gets ``aenv_void``.
        """
        del instance_id
        agent_data: AgentData = kwargs["agent_data"]
        try:
            episode = await self._episode(agent_data)
            tools = EnvironmentTools(episode, only=[self._own_name])
            tools.offered(self._listed)
            result = await tools.call(self.name, parameters)
        except AenvError:
            agent_data.extra_fields[VOID] = True
            raise
        return _response(result, with_images=False), 0.0, {}

    async def _episode(self, agent_data: AgentData) -> LiveEpisode:
        """Return the episode of a trajectory; concurrent first calls begin one."""
        begun = _episodes.setdefault(agent_data, {})
        if self._pool not in begun:
            task = task_of_column((agent_data.tools_kwargs.get(ROW) or {}).get("task"))
            begun[self._pool] = asyncio.create_task(self._begun(agent_data, task))
        return await asyncio.shield(begun[self._pool])

    async def _begun(self, agent_data: AgentData, task: Mapping[str, Any]) -> LiveEpisode:
        episode = await self._pool.begin(task)
        weakref.finalize(agent_data, episode.finish_soon)
        return episode
