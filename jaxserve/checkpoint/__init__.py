"""Weights from files into the shards of each role."""
