"""Number formats: what a value looks like in weights, in the KV cache and on the wire."""
