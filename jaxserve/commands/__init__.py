"""Main programs of `serve`'s processes, by the part that a process plays in its runtime."""
