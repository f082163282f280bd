"""A client that calls ``echo``; our package and AEnvironment's run the same code.

    python gateway_client.py PACKAGE REFERENCE OPTIONS

It reads commands from standard input: ``p50 COUNT`` prints the median seconds of sequential calls,
``rate COUNT`` the calls per second of concurrent ones, each on a line that begins with ``FIGURE``.
"""

import asyncio
import importlib
import json
import statistics
import sys
import time

AT_ONCE = 32
ARGUMENTS = {"text": "hi"}


async def p50_s(env, count):
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await env.call_tool("echo", ARGUMENTS)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def per_s(env, count):
    left = iter(range(count))

    async def work():
        for _ in left:
            result = await env.call_tool("echo", ARGUMENTS)
            assert not result.is_error

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))  # noqa: TID251  # Python 3.10 as well
    return count / (time.perf_counter() - started)


async def main(package, reference, options):
    env = importlib.import_module(package).Environment(reference, **json.loads(options))
    await env.initialize()
    try:
        await p50_s(env, 30)
        print("FIGURE 0", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            what, count = line.split()
            figure = await {"p50": p50_s, "rate": per_s}[what](env, int(count))
            print(f"FIGURE {figure}", flush=True)
    finally:
        await env.release()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
