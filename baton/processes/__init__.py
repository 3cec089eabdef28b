"""Processes of one machine: sessions, forced exit, exit notices, free ports."""
