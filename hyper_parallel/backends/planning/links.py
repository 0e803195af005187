"""The way to far memory where the framework gives no clock of its own: from the copies of a step, else a copy on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.planner.profile import Link

__all__ = ["HostProbe", "host_rate", "link_of_spans", "rate_of"]

_LEAST_SPAN_BYTES: Final = 4 * 2**20  # below this a copy's fixed cost hides the link
_PROBE_BYTES: Final = 4 * 2**20
_PROBES: Final = 5


def rate_of(spans: Sequence[LinkSpan], track: str) -> float | None:
    """Bytes per second of the large copies in one direction; None where there were none."""
    rates = [
        span.nbytes / (span.end_us - span.start_us) * 1e6
        for span in spans
        if span.track == track and span.nbytes >= _LEAST_SPAN_BYTES and span.end_us > span.start_us
    ]
    return statistics.median(rates) if rates else None


def host_rate() -> float:
    """Simulated time has no length: what a copy costs there is a copy on the host."""
    source, target = bytearray(_PROBE_BYTES), bytearray(_PROBE_BYTES)
    times = []
    for _ in range(_PROBES):
        started = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - started)
    return float(_PROBE_BYTES / max(statistics.median(times), 1e-9))


class HostProbe:
    """Copies on the host, which stand for the link where there is no clock of the device; see ``planner.shared_link``."""

    def bytes_per_second(self, *, goes_out: bool, is_shared: bool) -> float:
        """The same in both directions."""
        return host_rate()


def link_of_spans(spans: Sequence[LinkSpan]) -> Link:
    """Both directions."""
    rate = host_rate()
    return Link(
        out_bytes_per_second=rate_of(spans, "copy out") or rate, in_bytes_per_second=rate_of(spans, "copy back") or rate
    )
