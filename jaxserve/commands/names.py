"""The commands of `jaxserve COMMAND`, for `jaxserve/__main__.py` and `completion.py`."""

COMMANDS = {
    "serve": ("jaxserve.serve", "serve a model, or a part of a deployment"),
    "check": ("jaxserve.check", "what every device would hold, and whether it fits"),
    "generate": ("jaxserve.generate", "complete one prompt, here or on a server"),
    "plan": ("jaxserve.plan", "layouts, cost and speed before anything is rented"),
    "bench": ("jaxserve.bench.__main__", "measure"),
    "chaos": ("jaxserve.chaos.__main__", "faults on purpose, under load with known answers"),
    "launch": ("jaxserve.launch.__main__", "write what starts a deployment on a cluster or host"),
    "convert": ("jaxserve.convert", "a Hugging Face folder to sharded arrays, quantised once"),
    "doctor": ("jaxserve.commands.doctor", "what this host has and what would run on it"),
    "preflight": ("jaxserve.preflight.__main__", "check hosts, devices and links before a start"),
    "completion": ("jaxserve.commands.completion", "print a completion script for a shell"),
}
"""Module with `main` and `parser`, and purpose, of each command by its name."""
