"""Programs that show DualPath at work; each also serves as an example of how to do it."""
