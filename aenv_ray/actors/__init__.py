"""Where instances live on Ray: pure cores, thin ``@ray.remote`` shells, and the handles to them."""
