"""Frozen, strict configuration: model and deployment."""
