"""Linux as the runtime uses it: system calls, threads, child processes."""
