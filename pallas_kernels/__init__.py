"""The operations that dominate LLM serving, one folder each.

`<op>/api.py` checks the arguments and picks a backend; `<op>/reference.py` defines the operation in
plain `jax.numpy`. Called by jaxserve's model code, of which it imports nothing. Every operation
works inside `jax.jit` and inside `jax.shard_map`.
"""
