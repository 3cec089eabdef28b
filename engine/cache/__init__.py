"""The blocks of the KV cache: which are free, which are referenced, and which prefixes they hold."""
