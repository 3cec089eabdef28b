"""Common parts of both roles: engine thread, TP ranks, gRPC start-up, attempts, beats, registration, drain."""
