"""Authenticated connections between two processes, on which every link runs."""
