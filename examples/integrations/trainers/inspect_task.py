"""Evaluate a model with Inspect on tasks of mini-terminal.

pip install 'aenv-ray[inspect]'
inspect eval inspect_task.py --model openai/gpt-5-mini --no-fail-on-error --retry-on-error 2
"""

from inspect_ai import Task, task
from inspect_ai.solver import generate, use_tools

from aenv_ray.integrations.inspect_ai import EnvironmentToolSource, environment_reward, samples

TASKS = [
    {
        "id": "count-lines-01",
        "instruction": "How many lines of notes.txt contain the word error, in upper or lower "
        "case, as a whole word? Write the number to answer.txt.",
        "setup": {"function": "start_task", "arguments": {"task_id": "count-lines-01"}},
        "reward": {"name": "task_reward", "arguments": {"task_id": "count-lines-01"}},
    }
]


@task
def terminal() -> Task:
    return Task(
        dataset=samples(TASKS),
        solver=[use_tools(EnvironmentToolSource()), generate()],
        sandbox=("aenv", "mini-terminal"),
        scorer=environment_reward(),
    )
