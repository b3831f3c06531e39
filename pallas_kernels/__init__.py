"""The operations that decide the speed of LLM serving, one folder each.

`<op>/api.py` checks the arguments and picks a backend; `<op>/reference.py` is the definition in
plain `jax.numpy`. Called by the model code of jaxserve, of which it knows and imports nothing.
Every operation works inside `jax.jit` and inside `jax.shard_map`.
"""
