"""What both roles are made of: engine thread, TP ranks, gRPC start-up, attempts, beats, registration, drain."""
