"""Several processes as one deployment: joining them, step plans, heartbeats, failures.

`bootstrap` joins the processes (roles, devices, `jax.distributed`), `control` says what the leader
and the followers tell each other, `leader` and `follower` are the two ends. Knows nothing of
requests, models or device arrays.
"""
