"""Services: environments with replicas, as Serve applications."""
