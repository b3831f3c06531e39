"""Files for what starts processes: Kubernetes, Slurm, Cloud TPU, systemd, containers.

`python -m jaxserve.launch` renders them from a deployment file. Nothing else calls this package.
"""
