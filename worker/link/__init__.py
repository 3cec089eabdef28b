"""The worker's side of the links to routers: handles of attempts, one session per connection, the listener."""
