"""Rollouts and a sandbox for SLIME.

In a module of yours:

    custom_generate = rollouts("mini-terminal@1.0.0")

and in the command of the training:

    --custom-generate-function-path my_module.custom_generate
    --custom-reward-post-process-path aenv_ray.integrations.slime.post_process_rewards

A sample's ``metadata["aenv"]`` is its task. The function sets the reward, so SLIME calls no reward
model, except with ``--group-rm``, for which `custom_rm` is. A void sample has `remove_sample`,
which takes it out of the loss, but not out of the normalization of its group: that is what
`post_process_rewards` is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, Self

from aenv_ray.client.environment import Environment
from aenv_ray.errors import ConfigError, FileAccessError
from aenv_ray.integrations.episodes import EpisodeOutcome, EpisodePool
from aenv_ray.integrations.support.token_loop import (
    MAX_TURNS,
    Parse,
    Tokens,
    Turn,
    hermes_calls,
    played,
)
from aenv_ray.integrations.support.token_loop import turns as model_turns

VOID: Final = "aenv_void"
"""Key in the metadata of a sample that nothing can be learned from."""
_NORMALIZED: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_STANDARDIZED: Final = ("grpo", "gspo", "cispo")
_EPSILON: Final = 1e-6


def rollouts(
    environment: str | Path,
    *,
    max_turns: int = MAX_TURNS,
    parse: Parse = hermes_calls,
    void_retries: int = 1,
    **pool: Any,
) -> Callable[[Any, Any, dict[str, Any]], Awaitable[Any]]:
    """Return a function for ``--custom-generate-function-path``.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        max_turns: Maximum number of turns of the model.
        parse: Finds tool calls in its text.
        void_retries: How often a void episode is played again.
        pool: Options of `EpisodePool`.
    """
    episodes = EpisodePool(environment, **pool)

    async def custom_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        state, post = _slime()
        tokenizer = state(args).tokenizer
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

        async def generate(ids: list[int], left: int) -> Turn:
            limit = min(left, sampling_params["max_new_tokens"])
            payload = {
                "input_ids": ids,
                "sampling_params": {**sampling_params, "max_new_tokens": limit},
                "return_logprob": True,
            }
            return _turn(sample, await post(url, payload))

        prompt = sample.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            outcome, tokens = await played(
                episodes,
                dict((sample.metadata or {}).get("aenv", {})),
                lambda episode: model_turns(
                    episode, tokenizer, messages, generate,
                    max_tokens=sampling_params["max_new_tokens"], max_turns=max_turns, parse=parse,
                ),
                void_retries=void_retries,
            )  # fmt: skip
        except _Aborted:
            sample.status = type(sample).Status.ABORTED
            return sample
        return _filled(sample, tokenizer, outcome, tokens)

    return custom_generate


def _slime() -> tuple[Any, Any]:
    """Return SLIME's ``GenerateState`` and ``post``.

    Raises:
        ConfigError: It is missing, or of another version.
    """
    try:
        from slime.rollout.sglang_rollout import GenerateState
        from slime.utils.http_utils import post
    except ImportError as exc:
        raise ConfigError(
            f"SLIME is not installed, or differs from its source of August 2026: {exc}",
            hint="install SLIME from its repository, github.com/THUDM/slime",
        ) from exc
    return GenerateState, post


class _Aborted(Exception):
    """SLIME has enough samples and has stopped the requests of this one."""


def _turn(sample: Any, output: Mapping[str, Any]) -> Turn:
    """Return SGLang's answer; the version of its weights is noted in the sample.

    Raises:
        _Aborted: The answer was cut off.
    """
    meta = output["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise _Aborted
    pairs = meta["output_token_logprobs"]
    version = str(meta.get("weight_version", ""))
    if version:
        sample.weight_versions.append(version)
    return Turn(
        token_ids=[pair[1] for pair in pairs],
        logprobs=[pair[0] for pair in pairs],
        versions=[int(version)] * len(pairs) if version.isdigit() else (),
        is_truncated=meta["finish_reason"]["type"] == "length",
    )


def _filled(sample: Any, tokenizer: Any, outcome: EpisodeOutcome, tokens: Tokens | None) -> Any:
    """Return the sample with tokens, mask, log-probabilities, reward and status."""
    if tokens is None:
        end = tokenizer.eos_token_id or 0
        tokens = Tokens([end], [end], [0], [0.0], [-1])
    sample.tokens = [*tokens.prompt_ids, *tokens.response_ids]
    sample.response = tokenizer.decode(tokens.response_ids, skip_special_tokens=False)
    sample.response_length = len(tokens.response_ids)
    sample.loss_mask = tokens.mask
    sample.rollout_log_probs = tokens.logprobs
    sample.reward = outcome.reward
    status = "TRUNCATED" if tokens.is_truncated else "COMPLETED"
    sample.metadata = {
        **(sample.metadata or {}), VOID: outcome.is_void,
        "aenv_status": outcome.episode.status.value, "aenv_error": outcome.episode.error,
    }  # fmt: skip
    if outcome.is_void:
        status = "FAILED"
        sample.remove_sample = True
        sample.reward = 0.0  # SLIME needs a number; it is in no loss and no baseline
    sample.status = type(sample).Status[status]
    return sample


async def custom_rm(args: Any, sample: Any, **options: Any) -> float | list[float]:
    """Return the reward that the episode of a sample gave, or those of a list of samples.

    For ``--custom-rm-path``, which ``--group-rm`` needs: SLIME then asks for the rewards of a
    group, and replaces those that the samples have.

    Raises:
        ConfigError: An episode had no reward.
    """
    del args, options
    if isinstance(sample, list):
        return [_reward(one) for one in sample]
    return _reward(sample)


def _reward(sample: Any) -> float:
    if sample.reward is None:
        raise ConfigError(
            "the episode of a sample has no reward",
            hint="give tasks a reward, or another reward model",
        )
    return float(sample.reward)


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Normalize rewards in each group as SLIME does, without its void samples.

    For ``--custom-reward-post-process-path``.

    Returns:
        The rewards for metrics, where a void sample has the mean of the others, and those for
        advantages, where it has 0.
    """
    is_void = [bool((sample.metadata or {}).get(VOID)) for sample in samples]
    given = [float(sample.get_reward_value(args)) for sample in samples]
    kept = [reward for reward, void in zip(given, is_void, strict=True) if not void]
    mean = fmean(kept) if kept else 0.0
    raw = [mean if void else reward for reward, void in zip(given, is_void, strict=True)]
    if args.advantage_estimator not in _NORMALIZED or not args.rewards_normalization:
        return raw, [0.0 if void else reward for reward, void in zip(given, is_void, strict=True)]
    groups: dict[Any, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(index)
    is_standardized = args.advantage_estimator in _STANDARDIZED and args.grpo_std_normalization
    normalized = [0.0] * len(samples)
    for indices in groups.values():
        scored = [index for index in indices if not is_void[index]]
        rewards = [given[index] for index in scored]
        center = fmean(rewards) if rewards else 0.0
        scale = 1.0
        if is_standardized:
            scale = (stdev(rewards) if len(rewards) > 1 else 0.0) + _EPSILON
        for index in scored:
            normalized[index] = (given[index] - center) / scale
    return raw, normalized


class AenvSandbox:
    """An instance as a `slime.agent.sandbox.Sandbox`.

    Commands and files belong to the one user of the sandbox, whatever `user` says. Infrastructure
    errors are raised as they are, and not tried again: calls of ours run once.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        options: The options of `Environment`.
    """

    def __init__(self, environment: str, **options: Any) -> None:
        self._environment = Environment(environment, **{"actor": "shared", **options})
        self.sandbox_id = ""

    async def __aenter__(self) -> Self:
        await self._environment.initialize()
        self.sandbox_id = self._environment.instance_id or ""
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._environment.release()

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> tuple[int, str, str]:
        """Run a command in the shell; return exit code, stdout and stderr.

        Raises:
            RuntimeError: It failed, and `check` is set.
            ToolTimeout: It ran longer than `timeout` seconds; its processes were killed.
        """
        del user, idempotent
        done = await self._environment.exec(cmd, env=env, timeout=timeout)
        error = done.stderr.decode(errors="replace")
        if check and done.exit_code:
            raise RuntimeError(f"exit code {done.exit_code} of {cmd[:120]!r}: {error[:400]}")
        return done.exit_code, done.text(), error

    async def write_file(
        self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root"
    ) -> None:
        """Write text, bytes, or the content of a local file."""
        del user
        if isinstance(content, Path):
            content = await asyncio.to_thread(content.read_bytes)
        await self._environment.write_file(sandbox_path, content)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file; empty if it cannot be read, as SLIME expects."""
        del user
        try:
            return (await self._environment.read_file(sandbox_path)).decode(errors="replace")
        except FileAccessError:
            return ""
