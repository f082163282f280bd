"""An engine without processes, for tests of what is above engines; its entry point is `engine`."""
