"""Template processes, the instances forked from them, and their isolation."""
