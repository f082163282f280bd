"""``python -m tests.e2e.chaos_daemon``: chaos that also kills the Docker daemon; needs root.

The daemon is started for the run. The options are those of `aenv_ray.testing.chaos`.
"""

from __future__ import annotations

import contextlib
import sys

from aenv_ray.testing import chaos
from tests.contract.docker.own_daemon import OwnDaemon


def main() -> int:
    with contextlib.ExitStack() as stack:

        def make_daemon(image: str) -> OwnDaemon:
            daemon = OwnDaemon(image=image)
            stack.callback(daemon.end)
            return daemon

        return chaos.main(make_daemon)


if __name__ == "__main__":
    sys.exit(main())
