"""Which blocks belong to whom, and which prefixes they hold."""
