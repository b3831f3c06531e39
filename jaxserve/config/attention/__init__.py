"""Kinds of attention, one file each. A process imports those of its own model only."""
