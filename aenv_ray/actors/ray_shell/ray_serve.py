"""Ray Serve's API: start it, deploy an application, look at applications, delete one.

Importing Serve takes 1.7 s, so each function imports it when it is called.
"""

from __future__ import annotations

import logging
from typing import Any


def start() -> None:
    """Start Serve in the connected cluster, without its HTTP proxies; idempotent."""
    from ray import serve
    from ray.serve.config import ProxyLocation

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location=ProxyLocation.Disabled)


def deploy(replica: type, *arguments: Any, app: str, **options: Any) -> None:
    """Deploy an application with one deployment, or update it; wait until it runs.

    Args:
        replica: Class of the replicas.
        arguments: Constructor arguments of each replica.
        app: Name of the application.
        options: Options of ``serve.deployment``.

    Raises:
        RuntimeError: A replica did not start; Serve's own message says why.
    """
    from ray import serve

    application = serve.deployment(**options)(replica).bind(*arguments)
    serve.run(application, name=app, route_prefix=None)


def applications() -> dict[str, Any]:
    """Return the status of each application (``ray.serve.schema.ApplicationStatusOverview``)."""
    from ray import serve

    return dict(serve.status().applications)


def delete(app: str) -> None:
    """Delete an application and wait until its replicas have ended."""
    from ray import serve

    serve.delete(app)
