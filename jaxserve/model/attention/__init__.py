"""Attention families and the KV cache; knows nothing of ffn and link."""
