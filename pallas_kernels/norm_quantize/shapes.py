"""Norms of real models, by name: tests compile them, the bench runs them."""

WIDTHS = {"qwen3_30b": 2048, "qwen3_235b": 4096, "step3": 7168, "widest": 8192}
"""Columns of a row, by model. DeepSeek-V3 and Kimi K2 have the width of Step-3."""
DECODE, PREFILL = 128, 16384
"""Rows of a decode step and of a prefill step."""
TOKENS = (DECODE, PREFILL)
