"""The router's OpenAPI document: requests, with the limits of this router, and answers."""
