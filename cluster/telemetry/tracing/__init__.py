"""OpenTelemetry traces: one per request, from the client's context to the last token."""
