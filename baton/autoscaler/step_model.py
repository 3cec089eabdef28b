"""How long a decode step takes, by the sequences in it: seconds = base + each · batch, learned from workers."""

from __future__ import annotations

from dataclasses import dataclass, field

HALF_LIFE_SECONDS = 6 * 3600.0
NEW_SHARE = 0.1  # of a new look at a batch size, in what is remembered of it
MIN_VARIETY = 0.15  # deviation of batches over their mean: with less a slope means nothing


@dataclass
class StepModel:
    """Weighted least squares over (batch, seconds of a step), older ones counting less and less."""

    weight: float = 0.0  # Σ w, steps
    batch: float = 0.0  # means
    seconds: float = 0.0
    spread: float = 0.0  # Σ w (batch − mean)²
    product: float = 0.0  # Σ w (batch − mean)(seconds − mean)
    seen: dict[int, float] = field(default_factory=dict)  # batch → seconds, of late
    slope: float | None = None  # seconds a sequence, from when batches last differed enough to tell

    def forget(self, seconds: float) -> None:
        """Time goes by."""
        keep = 0.5 ** (max(0.0, seconds) / HALF_LIFE_SECONDS)
        self.weight, self.spread, self.product = self.weight * keep, self.spread * keep, self.product * keep

    def add(self, batch: float, seconds: float, steps: float) -> None:
        """`steps` steps of on average `batch` sequences took `seconds` each."""
        if steps <= 0 or batch <= 0 or seconds <= 0:
            return
        self.weight += steps
        share = steps / self.weight
        from_batch, from_seconds = batch - self.batch, seconds - self.seconds
        self.batch += share * from_batch
        self.seconds += share * from_seconds
        self.spread += steps * from_batch * (batch - self.batch)
        self.product += steps * from_batch * (seconds - self.seconds)
        if self.spread > self.weight * (MIN_VARIETY * self.batch) ** 2 > 0:
            self.slope = self.product / self.spread
        size = round(batch)
        self.seen[size] = self.seen.get(size, seconds) * (1 - NEW_SHARE) + seconds * NEW_SHARE

    @property
    def known(self) -> bool:
        return self.weight > 0

    @property
    def each(self) -> float:
        """Seconds that one more sequence adds. As long as batches have not differed enough to tell: as if all of a
        step were due to its batch, which promises nothing that has not been seen."""
        if self.batch <= 0:
            return 0.0
        most = self.seconds / self.batch
        return most if self.slope is None else min(most, max(self.slope, 0.02 * most))

    @property
    def base(self) -> float:
        return max(0.0, self.seconds - self.each * self.batch)

    def batch_within(self, seconds: float) -> float:
        """The largest batch whose steps take at most `seconds`; at least 1. The line is believed up to twice the
        largest batch seen, and not at all where it says that no batch is small enough. What was seen to fit, fits."""
        if self.each <= 0:
            return 1.0
        proportional = self.batch * seconds / self.seconds
        line = (seconds - self.base) / self.each
        fits = max((size for size, took in self.seen.items() if took <= seconds), default=0)
        return max(1.0, min(max(line, proportional / 2), 2.0 * max(self.seen)), float(fits))
