"""The process engine; its entry point is `engine`."""
