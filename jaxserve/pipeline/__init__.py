"""The order of stages, the driver that enqueues them, and what they took."""
