"""How long something will still take: the work that is left, at the pace of the work that was done last.

Work is counted in units that take about the same time each. A machine may become slower or faster while it works, so units
that were done long ago say little: the pace is that of the last ``RECENT`` of all units, or of all that were done so far
where they are fewer. A unit that takes longer than that pace makes the pace slower before it ends.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TimeLeft", "in_words"]

RECENT: Final = 0.16  # of all units
_MOST_OF_OPEN: Final = 0.8  # of the unit that has begun: so much of it may be over
_A_FEW_S: Final = 10.0
_MINUTES_FROM_S: Final = 90.0


class TimeLeft:
    """An estimate that follows what is done. Times are seconds of one clock."""

    def __init__(self, total: float, now: float) -> None:
        self._total = total
        self._marks = [(now, 0.0)]  # (when, units done by then)

    def reach(self, done: float, now: float) -> None:
        """So many units in all are done by now; fewer than before change nothing."""
        if done > self._marks[-1][1]:
            self._marks.append((now, min(done, self._total)))

    def shrink(self, units: float) -> None:
        """There is so much less to do than was thought. What need not be done takes no time, and says nothing of the pace."""
        self._total = max(self._marks[-1][1], self._total - units)

    def seconds(self, now: float) -> float | None:
        """What is left; None before anything is done."""
        last, done = self._marks[-1]
        if len(self._marks) == 1:
            return None
        began, before = self._recent()
        open_seconds = max(0.0, now - last)
        unit = done - self._marks[-2][1]
        pace = (last - began) / (done - before)
        pace = max(pace, (now - began) / (done - before + unit))  # the open unit is late
        return max(0.0, (self._total - done) * pace - min(open_seconds, _MOST_OF_OPEN * unit * pace))

    def _recent(self) -> tuple[float, float]:
        """The newest mark that lies far enough back, or the first one."""
        done = self._marks[-1][1]
        return next((mark for mark in reversed(self._marks) if done - mark[1] >= RECENT * self._total), self._marks[0])


def in_words(seconds: float) -> str:
    """An estimate for a person, no finer than it is good."""
    if seconds < _A_FEW_S:
        return "a few seconds"
    return f"about {round(seconds, -1):.0f} s" if seconds < _MINUTES_FROM_S else f"about {seconds / 60:.0f} min"
