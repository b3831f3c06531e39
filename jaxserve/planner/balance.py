"""How many attention devices cost least beside given ffn devices: the analytic rule.

Called by `search.py` with predicted times, of equal sequences (the mean field) or with the barrier
term of unequal ones, and by `comparison.py` with times that a running server measured.
"""

from typing import NamedTuple

from jaxserve.planner.layouts import Layout


class Balance(NamedTuple):
    """Seconds of a lane's step in all layers on both roles, with a layout's batch.

    Attributes:
      attend: of a DP group; its sequences stay the same however many groups there are.
      ffn: of the ffn role.
      doubled: of the ffn role with twice as many DP groups.
    """

    attend: float
    ffn: float
    doubled: float

    def attention_devices(self, layout: Layout, prices: tuple[float, float]) -> float:
        """Returns the attention devices for which a token costs least (Song et al. 2026).

        The ffn role takes a constant, its weights, and a time for each DP group. Up to as many
        groups as keep it busy for as long as a group attends, more cost nothing but themselves.
        Behind that they make all wait, and pay only while the constant weighs more.

        Args:
          prices: of a device of either role.
        """
        each = (self.doubled - self.ffn) / layout.dp
        constant = self.ffn - each * layout.dp
        if each <= 0:
            return float("inf")
        attention, ffn = prices[0] * layout.tp, prices[1] * layout.ffn_devices
        cheapest = max(0.0, constant / each * ffn / attention) ** 0.5
        return layout.tp * max((self.attend - constant) / each, cheapest)

    def text(self, layout: Layout, prices: tuple[float, float]) -> str:
        """Says it beside the layout's own numbers."""
        return (
            f"{layout.attention_devices} attention devices beside {layout.ffn_devices} for the "
            f"FFN; by the analytic rule {self.attention_devices(layout, prices):.0f} cost least "
            f"with this batch (a lane's step: {self.attend * 1e3:.1f} and {self.ffn * 1e3:.1f} ms)"
        )
