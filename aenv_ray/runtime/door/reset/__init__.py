"""The reset of an instance, and the end of what an agent has started or left."""
