"""What a deployment will cost and how fast it will be, before anything is rented. Plain arithmetic
over model configurations and hardware files; nothing here imports JAX."""
