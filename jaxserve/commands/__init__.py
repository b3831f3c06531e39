"""What `serve` runs in a process, by the part that the process plays in its runtime."""
