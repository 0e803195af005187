"""Small run records, made by hand."""

from __future__ import annotations

import dataclasses

from hyper_parallel.fates import Fate
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.run_record import (
    PROCESS_PART,
    FateTotal,
    MemoryCurve,
    OpTotal,
    RegionTotal,
    RunRecord,
    StepRecord,
)
from hyper_parallel.records.versions import Versions
from hyper_parallel.records.work_span import Track, WorkSpan

MIB = 2**20
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&\"'\u2028{{run}}"

VERSIONS = Versions(
    framework="torch", framework_version="2.13.0", device="a device", library_version="0.1.0", python_version="3.11.7"
)


def small_step(
    name: str = "swap", *, scale: float = 1.0, gradients: str = "abc", layer: str = "layers.0"
) -> StepRecord:
    return StepRecord(
        name=name,
        what=f"{name}_wrapper(layer)",
        peak_bytes=int(700 * MIB * scale),
        peak_where=f"backward of {layer}",
        peak_parts={PROCESS_PART: 300 * MIB, "weights": 50 * MIB, "activations and workspace": int(350 * MIB * scale)},
        step_seconds=0.25 / scale,
        out_bytes=100 * MIB,
        back_bytes=90 * MIB,
        exposed_seconds=0.004,
        losses=(2.5, 2.25),
        gradients=gradients,
        memory=MemoryCurve(times_us=(0.0, 100_000.0, 200_000.0), nbytes=(300 * MIB, int(700 * MIB * scale), 350 * MIB)),
        spans=(
            WorkSpan(track=Track.FORWARD, name=layer, start_us=0.0, end_us=90_000.0),
            WorkSpan(track=Track.COPY_OUT, start_us=20_000.0, end_us=60_000.0, nbytes=100 * MIB),
            WorkSpan(track=Track.STALL, start_us=95_000.0, end_us=99_000.0),
            WorkSpan(track=Track.COPY_BACK, start_us=95_000.0, end_us=120_000.0, nbytes=90 * MIB),
            WorkSpan(track=Track.REPLAY, name=layer, start_us=100_000.0, end_us=120_000.0),
            WorkSpan(track=Track.BACKWARD, name=layer, start_us=100_000.0, end_us=190_000.0),
        ),
        fates=(
            FateTotal(fate=Fate.SWAP, nbytes=100 * MIB),
            FateTotal(fate=Fate.SAVE, reason="below_min_bytes", nbytes=3 * MIB),
        ),
        notes=("sampled",),
    )


def planned_step(name: str = "auto", *, op: str = "addmm") -> StepRecord:
    return dataclasses.replace(
        small_step(name, scale=0.5),
        ops=(
            OpTotal(op=op, count=4, swapped_bytes=80 * MIB, reason="it leaves while forward runs"),
            OpTotal(op="gelu", count=4, recomputed_bytes=60 * MIB, saved_bytes=5 * MIB, reason="cheap to make again"),
        ),
        predicted=Prediction(
            peak_bytes=80 * MIB,
            peak_where="backward of the head and loss",
            peak_parts={"base": 50 * MIB, "swap buffers": 30 * MIB},
            step_seconds=0.4,
            compute_seconds=0.3,
            replay_seconds=0.1,
            exposed_seconds=0.0,
            swapped_out_bytes=100 * MIB,
        ),
    )


def small_run(title: str = "A small run", **fields: object) -> RunRecord:
    steps = (small_step("none", gradients="abc"), small_step("swap", scale=0.75), planned_step())
    values: dict[str, object] = {
        "title": title,
        "created": "2026-11-15 12:00 UTC",
        "versions": VERSIONS,
        "memory_kind": "resident memory of the process",
        "budget_bytes": 100 * MIB,
        "settings": {"tiers": "('disk',)"},
        "machine": {"cores": "2"},
        "steps": steps,
        **fields,
    }
    return RunRecord(**values)  # type: ignore[arg-type]


def hostile_run() -> RunRecord:
    return small_run(
        title=HOSTILE,
        steps=(
            small_step(HOSTILE, layer=HOSTILE),
            dataclasses.replace(
                planned_step("auto", op=HOSTILE), regions=(RegionTotal(reason=HOSTILE, count=1, names=(HOSTILE,)),)
            ),
        ),
        settings={HOSTILE: HOSTILE},
        machine={},
        notes=(HOSTILE,),
    )
