"""The radix index in Redis: which worker holds which prefix. Fed by placements (predicted) and reports (confirmed)."""
