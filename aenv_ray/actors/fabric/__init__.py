"""What a driver calls: create, get, list, warm, publish."""
