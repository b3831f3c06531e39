"""The KV hand-off from prefill workers to decode domains."""
