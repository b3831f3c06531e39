"""Weights from running workers to starting ones."""
