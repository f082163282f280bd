"""Tests and tools for users of aenv-ray who write engines or environments, or run a cluster.

- `engine_contract.EngineContract`: subclass it to test an engine. Needs pytest and pytest-asyncio.
- `environment_check.check_environment`: finds problems of an environment project, as
  ``aenv test --check`` does.
- ``python -m aenv_ray.testing.chaos``: kills parts of a running fabric and counts what goes wrong.
"""
