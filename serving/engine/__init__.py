"""The engine: the loop of steps, the device side that it drives, and recovery from failures."""
