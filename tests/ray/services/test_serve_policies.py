"""A model in a Serve deployment as the policy of a sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aenv_ray.actors.ray_shell import ray_serve
from tests.ray.sampling.policies import WordModel, check_model_plays
from tests.ray.services.services import ServiceGateway

pytestmark = [pytest.mark.redis, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(service_gateway: ServiceGateway) -> Iterator[Any]:
    """Return the handle of a deployment, beside the services of the gateway."""
    del service_gateway
    ray_serve.deploy(WordModel, app="word-model", ray_actor_options={"num_cpus": 0})
    yield ray_serve.app_handle("word-model")
    ray_serve.delete("word-model")


@pytest.mark.parametrize("method", ["chat", None], ids=["a method", "the deployment"])
@pytest.mark.parametrize("runners", ["driver", "nodes"])
def test_a_model_in_a_serve_deployment_plays(model: Any, method: str | None, runners: str) -> None:
    check_model_plays(model if method is None else getattr(model, method), runners=runners)
