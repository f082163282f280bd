"""Instances on Ray: classes that decide, thin ``@ray.remote`` shells around them, and handles."""
