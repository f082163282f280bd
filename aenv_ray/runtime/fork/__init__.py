"""Template processes, the instances forked from them, and the walls around those."""
