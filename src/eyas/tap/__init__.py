"""What runs inside the engine's process: standard library and torch only; nothing here imports eyas."""
