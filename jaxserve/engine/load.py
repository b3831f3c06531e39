"""How much an engine has to do: what metrics and status pages show of it.

Made by the engine, read by the server, from any thread; the numbers need not be of one moment.
"""

import msgspec


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of the moment, and counters since the start.

    Attributes:
      running: sequences that get steps.
      waiting: requests that wait for pages and a slot.
      kv_usage: the part of its pages that each DP group uses, 0 … 1.
      page_size: tokens a page.
      pages: pages a DP group.
      preemptions: how often a sequence lost its pages to another.
      prefix_queries: tokens of prompts that were looked for in the prefix cache.
      prefix_hits: those that were found.
      invalid_logits: requests that ended because their logits were not finite numbers.
      compilations: programs that the step loop had to wait for; more than 0 is a flaw.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: list[float] = []
    page_size: int = 0
    pages: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    invalid_logits: int = 0
    compilations: int = 0
