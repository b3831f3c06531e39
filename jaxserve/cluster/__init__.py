"""Several processes: roles, step plans to followers, heartbeats."""
