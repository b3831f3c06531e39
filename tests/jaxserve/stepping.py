"""Prompts fed to a driver by hand, with no scheduler in between: what a step's logits are.

Used by the tests that compare a model's logits with a reference.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.engine.runtime import Runtime
from jaxserve.model.attention.kv_cache import page_pools
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows


class Sequences:
    """Up to three prompts on slots and pages that do not lie in order, stepped by hand."""

    def __init__(self, runtime: Runtime, prompts: Sequence[Sequence[int]], lane: int = 0):
        self.runtime, self.prompts, self.lane = runtime, prompts, lane
        self.slots = [4, 0, 2][: len(prompts)]
        self.fed = [0] * len(prompts)
        size = runtime.deployment.cache.page_size
        pools = page_pools(runtime.config, runtime.deployment)
        self.tables = len(pools[0].pages)
        self.recurrent = runtime.config.recurrent
        most = pools[0].pages[0] if self.recurrent else min(pools[0].pages)
        pages = np.random.default_rng(0).permutation(most).tolist()
        self.pages = [[pages.pop() for _ in range(-(-len(p) // size))] for p in prompts]
        self.steps = 0
        self.drafts: dict[int, list[int]] = {}  # those after the last step of each prompt

    def step(self, counts: Sequence[int]) -> dict[int, np.ndarray]:
        """Feeds so many further tokens of each prompt; the logits after the last one of each."""
        rows, size = [], self.runtime.deployment.cache.page_size
        fed = {index: count for index, count in enumerate(counts) if count}
        for index, count in fed.items():
            start, end = self.fed[index], self.fed[index] + count
            self.fed[index] = end
            ids = self.pages[index][: -(-end // size)]
            states = [self.slots[index]] * len(ids) if self.recurrent else ids
            rows.append(
                SequenceRow(
                    slot=self.slots[index],
                    token_ids=list(self.prompts[index][start:end]),
                    kv_length=end,
                    page_ids=np.stack([ids, states][: self.tables], axis=1).reshape(-1).tolist(),
                    # Others have no logits. Modules take a sampled token for the one that follows.
                    sample=end == len(self.prompts[index]) or not self.runtime.config.modules,
                    upcoming=list(self.prompts[index][end : end + self.runtime.config.modules]),
                )
            )
        groups = [sorted(rows, key=lambda row: row.slot)]
        groups += [[]] * (self.runtime.deployment.attention.dp - 1)
        most, bucket = self.runtime.deployment.scheduler.slots, self.runtime.buckets[-1]
        plan = plan_of_rows(self.lane, self.steps, bucket, groups, slots=most)
        self.steps += 1
        self.runtime.driver.begin(plan)
        finished = self.runtime.driver.advance()
        assert finished.plan is plan
        slots = {index: self.slots[index] for index in fed}
        last, logits = np.asarray(finished.last)[0], np.asarray(finished.logits)
        self.drafts |= {i: last[slot].tolist() for i, slot in slots.items()}
        return {i: logits[slot] for i, slot in slots.items()}

    def in_chunks(self, size: int, until: Sequence[float] = ()) -> list[dict[int, np.ndarray]]:
        """Feeds all of the prompts, at most `size` tokens of each a step.

        Args:
          until: tokens of each prompt behind which it goes on token by token; empty: never.

        Returns:
          for every prompt, position -> logits after the token there.
        """
        logits: list[dict[int, np.ndarray]] = [{} for _ in self.prompts]
        until = until or [float("inf")] * len(self.prompts)
        while any(rest := [len(p) - fed for p, fed in zip(self.prompts, self.fed, strict=True)]):
            sizes = [size if fed < end else 1 for fed, end in zip(self.fed, until, strict=True)]
            for index, row in self.step([*map(min, sizes, rest)]).items():
                logits[index][self.fed[index] - 1] = row
        return logits
