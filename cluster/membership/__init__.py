"""Who is there: registrations with leases, epochs and slots, kept in Redis by Redis's own clock."""
