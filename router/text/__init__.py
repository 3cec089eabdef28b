"""Text to tokens and back; long texts are processed on threads, beside the event loop."""
