"""Play an episode as SkyRL does.

pip install 'aenv-ray[skyrl-gym]'
python examples/integrations/trainers/skyrl_environment.py PROJECT
"""

import sys

import skyrl_gym


def main(environment: str) -> None:
    entry = "aenv_ray.integrations.skyrl_gym:SkyRLEnv"
    skyrl_gym.register("walk", entry, kwargs={"environment": environment})
    env = skyrl_gym.make("walk", env_config={}, extras={"task": {"id": "walk", "seed": 3}})
    prompt, _ = env.init([{"role": "user", "content": "Walk to the goal."}])
    print("messages", [message["role"] for message in prompt])
    env.step('<tool_call>{"name": "step", "arguments": {"action": 1}}</tool_call>')
    print("reward", env.step("I have arrived.")["reward"])
    env.close()


if __name__ == "__main__":
    main(sys.argv[1])
