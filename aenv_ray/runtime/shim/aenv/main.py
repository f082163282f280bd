"""``python -m aenv.main <project> --host … --port …``: AEnvironment's way to start a server."""

import sys

from aenv_ray.runtime.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
