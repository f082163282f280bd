"""Has the Pythons of ``./test`` collect garbage a fiftieth as often.

Python imports this when it starts, for ./test puts its directory on ``PYTHONPATH``. Most of what
these processes do is to start, a dozen for each Ray, and what is imported is no garbage: to look
through it again and again took a twentieth of the suite's time. Sandboxes get no such variable.
"""

import gc

gc.set_threshold(35_000, 20, 20)
