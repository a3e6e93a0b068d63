"""How many drafts are worth their time. No torch, no clock.

A draft costs a pass of a light block and a row of the verification, and pays only while the drafts
before it hold. So a request follows how often each depth holds, drafts as deep as that stays above
a floor, and now and then one deeper, to see whether things have changed. What it drafts never
changes a token: acceptance compares with the token that would come anyway.
"""

from dataclasses import dataclass, field

FLOOR = 0.2  # a depth that holds less often than this costs more than it gains
PROBE_PERIOD = 32  # verifications between two tries of one depth more
_WEIGHT = 0.2  # of the newest verification


@dataclass(slots=True)
class Acceptance:
    """Moving averages by depth: how often the draft there, and all before it, held."""

    rates: list[float] = field(default_factory=list)
    num_verified: int = 0

    def record(self, num_drafted: int, num_accepted: int, weight: float = _WEIGHT) -> None:
        self.num_verified += 1
        for depth in range(num_drafted):
            if depth == len(self.rates):
                self.rates.append(1.0)  # drafts are welcome until they prove useless
            self.rates[depth] += weight * ((depth < num_accepted) - self.rates[depth])

    def depth(self, most: int) -> int:
        """Tokens to draft next, at most ``most``."""
        rates = enumerate(self.rates[:most])
        worthwhile = next((depth for depth, rate in rates if rate < FLOOR), most)
        return min(worthwhile + (self.num_verified % PROBE_PERIOD == 0), most)

    def copy(self) -> "Acceptance":
        return Acceptance(list(self.rates))
