"""HTTP/1.1 connections: how they are accepted, read, bounded and answered, whatever the endpoint."""
