"""The docker engine; its entry point is `engine`."""
