"""Number formats of activations: in products, in the KV cache and on the wire."""
