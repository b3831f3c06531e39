"""Checks of hosts, devices and links before a deployment serves: `python -m jaxserve preflight`.

The process of the command starts no JAX backend. Every check on devices runs in a process of its
own (`worker.py`), which a deadline ends, so a hang or a crash costs one line of the table. Several
hosts run the same command; their checks meet over `meeting.py`.
"""
