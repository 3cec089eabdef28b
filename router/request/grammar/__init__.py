"""Whether a grammar of a client may be used: its keywords, and a trial in a process with bounds."""
