"""Traces by OpenTelemetry: one trace a request, from the client's context to the last token."""
