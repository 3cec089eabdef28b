"""Text to tokens and back, off the event loop where it takes long."""
