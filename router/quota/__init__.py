"""How much a tenant may use in a minute, counted over all routers."""
