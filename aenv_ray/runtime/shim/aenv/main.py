"""``python -m aenv.main <project> --host … --port …`` starts a server, as in AEnvironment."""

import sys

from aenv_ray.runtime.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
