"""Cost and speed of a deployment before anything is rented. Plain arithmetic over model
configurations and hardware files; nothing here imports JAX."""
