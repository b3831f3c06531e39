"""A decoder in blocks: attention, feed-forward layers, embedding, head and sampler."""
