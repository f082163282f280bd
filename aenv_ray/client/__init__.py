"""The client: `Environment` and its sync facade, over Ray or over HTTP."""

from aenv_ray.client.circuit import CircuitBreaker
from aenv_ray.client.environment import Environment
from aenv_ray.client.openai_names import openai_name
from aenv_ray.client.sync import SyncEnvironment

__all__ = ["CircuitBreaker", "Environment", "SyncEnvironment", "openai_name"]
