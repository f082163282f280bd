"""The same work on aenv-ray and on other libraries: see `benchmarks.peers.compare`."""
