"""Parts of the decoder that have a fast form: linear layers, norms, rotary embedding."""
