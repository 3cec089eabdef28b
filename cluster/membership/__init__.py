"""Registrations of workers in Redis: leases, epochs and slots, by Redis's own clock."""
