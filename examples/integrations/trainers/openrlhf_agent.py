"""The agent of OpenRLHF acts in mini-terminal.

    --train.agent_func_path examples/integrations/trainers/openrlhf_agent.py

A prompt is the text of the first message, and its label the task of the episode as JSON.
"""

from aenv_ray.integrations.openrlhf import agent_executor

AgentExecutor = agent_executor("mini-terminal", max_turns=16)
