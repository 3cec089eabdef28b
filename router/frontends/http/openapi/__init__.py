"""The router's own OpenAPI document: what may be asked, with the limits of this very router, and what is answered."""
