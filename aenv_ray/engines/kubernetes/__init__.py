"""The kubernetes engine; its entry point is `engine`."""
