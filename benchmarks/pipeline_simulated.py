"""Budgets and predictions for pipelines, on simulated devices in real processes.

    python -m benchmarks.pipeline_simulated --out benchmarks/results/pipeline_simulated_202611

Every rank is a process of its own (gloo) whose CPU tensors are the memory of a simulated device with a clock: an op takes what
its arithmetic or its bytes take, a copy takes the link. What a rank receives carries the sender's time, so a step takes what it
would take on such devices, bubbles included. The figures are the same on every machine; they are no device's.

For each schedule: the plain pipeline; the same under a budget; the same budget with swapping forbidden. And from the profile of
the whole model, measured in one process, what ``hyper-parallel plan --mesh`` predicts for the plain pipeline.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import faulthandler
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import hyper_parallel as hp
from hyper_parallel._version import __version__
from hyper_parallel.integrations import pipelining
from hyper_parallel.integrations.pipeline_schedules import order_of
from hyper_parallel.planner.mesh_prediction import Mesh, Network, predict_mesh
from hyper_parallel.planner.pipeline_order import makespan
from hyper_parallel.planner.pipeline_plan import RankPlanning
from hyper_parallel.testing import DeviceSpeed, simulated_accelerator

WIDTH, HEADS, LENGTH, BATCH, MICRO_BATCHES = 64, 4, 64, 4, 8
SPEED = DeviceSpeed(
    flops_per_second=2e10,
    memory_bytes_per_second=2e10,
    link_bytes_per_second=1e9,
    op_seconds=1e-6,
    copy_seconds=2e-6,
)
HOP_BYTES_PER_SECOND = 2e9
# Copies are launched together up to a part of these. Larger ones would put all of these small tensors into one batch.
WINDOW_BYTES, PREFETCH_BYTES = 2**20, 2**19
SHARE = 0.55  # of the plain step's activations that a budget allows
LIMIT_S = 3000
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@dataclasses.dataclass(frozen=True)
class Case:
    """One pipeline."""

    schedule: str
    ranks: int
    stages_per_rank: int
    blocks_per_stage: int

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.stages} stages on {self.ranks} ranks"


CASES = (
    Case("1f1b", 4, 1, 3),
    Case("interleaved", 4, 2, 2),
    Case("interleaved", 2, 2, 3),
    Case("1f1b", 2, 1, 3),
    Case("gpipe", 2, 1, 3),
)


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """The blocks of one stage."""

    def __init__(self, stage: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tensors(seed: int, count: int = 1) -> torch.Tensor:
    return torch.randn(count * BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


class SharedClock:
    """What a rank receives is there when the sender's device had made it and the network had brought it."""

    def __init__(self, store: Any, device: Any, stages: list[PipelineStage], seconds: float) -> None:
        self.store, self.device, self.hop_seconds = store, device, seconds
        self.counts: dict[tuple[str, int, int], int] = {}
        self.own = {stage.stage_index for stage in stages}
        for stage in stages:
            forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
            stage.forward_one_chunk = self._timed("F", stage, forward, -1)  # type: ignore[method-assign]
            stage.backward_one_chunk = self._timed("B", stage, backward, 1)  # type: ignore[method-assign]

    def _timed(self, kind: str, stage: PipelineStage, run: Callable[..., Any], step: int) -> Callable[..., Any]:
        index, last = stage.stage_index, stage.num_stages - 1

        def call(number: int, *args: Any, **kwargs: Any) -> Any:
            count = self.counts[kind, index, number] = self.counts.get((kind, index, number), -1) + 1
            source = index + step
            compute = self.device.timeline.compute
            if 0 <= source <= last:
                sent = float(self.store.get(f"{count}/{kind}/{source}/{number}").decode())
                hop = 0.0 if source in self.own else self.hop_seconds
                compute.seconds = max(compute.seconds, sent + hop)
            result = run(number, *args, **kwargs)
            self.store.set(f"{count}/{kind}/{index}/{number}", repr(compute.seconds))
            return result

        return call


class Rank:
    """One rank of one case."""

    def __init__(self, case: Case, rank: int, store: Any) -> None:
        self.case, self.rank, self.store = case, rank, store

    def gathered(self, value: Any) -> list[Any]:
        rows: list[Any] = [None] * self.case.ranks
        dist.all_gather_object(rows, value)
        return rows

    def run(self, what: str, budget: int | None = None) -> dict[str, Any]:
        """A pipeline made anew, treated, and its third step measured."""
        hp.SwapManager().reset()
        case = self.case
        numbers = range(self.rank, case.stages, case.ranks)
        parts = [Stack(number, case.blocks_per_stage) for number in numbers]
        hop_seconds = BATCH * LENGTH * WIDTH * 4 / HOP_BYTES_PER_SECOND
        with simulated_accelerator(speed=SPEED, window_bytes=WINDOW_BYTES, prefetch_bytes=PREFETCH_BYTES) as device:
            stages = [
                PipelineStage(part, number, case.stages, torch.device("cpu")) for part, number in zip(parts, numbers)
            ]
            SharedClock(dist.PrefixStore(f"{case.name}/{what}", self.store), device, stages, hop_seconds)
            target = stages if case.stages_per_rank > 1 else stages[0]
            schedule = SCHEDULES[case.schedule](target, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)  # type: ignore[operator]
            batch = tensors(1, MICRO_BATCHES) if self.rank == 0 else None
            wanted = tensors(2, MICRO_BATCHES) if self.rank == case.ranks - 1 else None

            def step() -> None:
                inputs = () if batch is None else (batch,)
                schedule.step(*inputs, target=wanted, losses=None if wanted is None else [], return_outputs=False)

            found = self._treated(what, budget, schedule, stages, step, hop_seconds)
            step()
            step()
            for part in parts:
                for weight in part.parameters():
                    assert weight.grad is not None
                    weight.grad.zero_()
            dist.barrier()
            before, began = hp.stats(), max(self.gathered(device.seconds))
            device.timeline.compute.seconds = began
            rest = device.live_bytes
            device.reset_peak()
            step()
            after = hp.stats().since(before)
            gradients = [
                weight.grad.clone() for part in parts for weight in part.parameters() if weight.grad is not None
            ]
            found |= {
                "rest_bytes": rest,
                "peak_bytes": device.peak_bytes,
                "end_seconds": device.seconds - began,
                "swapped_bytes": after.swapped_out_bytes,
                "returned_bytes": after.swapped_in_bytes,
                "misses": after.misses,
                "gradients": gradients,
            }
        found["step_seconds"] = max(self.gathered(found["end_seconds"]))
        return found

    def _treated(
        self, what: str, budget: int | None, schedule: Any, stages: list[Any], step: Callable[[], None], hop: float
    ) -> dict[str, Any]:
        if what == "plain":
            return {}
        assert budget is not None
        treated = pipelining.apply(schedule, budget=budget, step=step)
        assert treated.fitted is not None
        plan = treated.fitted.plan
        found: dict[str, Any] = {}
        if what == "recomputed":
            found["profiles"] = None
            profiles = PROFILES[self.case.name]
            planning = RankPlanning(profiles, order_of(schedule), is_swap_allowed=False)
            try:
                plan = planning.plan(budget)
            except hp.BudgetTooSmallError as error:
                found["refused"] = str(error)
            treated.remove()
            for stage, part in zip(stages, plan.of_stages):
                hp.apply_plan(stage.submod, part)
        rows = self.gathered((order_of(schedule), plan.action_seconds))
        seconds = {action: value for _, own in rows for action, value in own.items()}
        spans = makespan([order for order, _ in rows], seconds, hop_seconds=hop)
        return found | {
            "predicted_peak_bytes": plan.plan.predicted_peak_bytes,
            "predicted_step_seconds": max(end for _, end in spans.values()),
            "most_in_flight": dict(plan.most_in_flight),
            "fitting": plan.fitting,
            "summary": plan.summary(),
        }


PROFILES: dict[str, Any] = {}


def keep_profiles() -> None:
    """What a fit measured is used again where swapping is forbidden."""
    from hyper_parallel.integrations import pipeline_budget

    original = pipeline_budget.PipelineFit._profiled

    def kept(self: Any, seen: Any) -> Any:
        profiles, budget = original(self, seen)
        PROFILES[CURRENT[0]] = profiles
        return profiles, budget

    pipeline_budget.PipelineFit._profiled = kept  # type: ignore[method-assign]


CURRENT = [""]


def rank_rows(case: Case, rank: int, store: Any) -> list[dict[str, Any]]:
    """The figures of one rank: plain, under the budget, and by recompute alone."""
    CURRENT[0] = case.name
    here = Rank(case, rank, store)
    rows = []
    plain = here.run("plain")
    wanted = plain.pop("gradients")
    budget = plain["rest_bytes"] + int(SHARE * (plain["peak_bytes"] - plain["rest_bytes"]))
    rows.append({"what": "plain", "rank": rank, **plain})
    for what in ("budget", "recomputed"):
        row = here.run(what, budget)
        gradients = row.pop("gradients")
        same = len(gradients) == len(wanted) and all(map(torch.equal, gradients, wanted))
        rows.append({"what": what, "rank": rank, "budget_bytes": budget, "is_bitwise": same, **row})
    return rows


def predicted_rows(case: Case) -> dict[str, Any]:
    """What the profile of the whole model, run in one process with one micro-batch, says of the plain pipeline."""
    model = nn.Sequential(*(Stack(number, case.blocks_per_stage) for number in range(case.stages)))
    batch, wanted = tensors(1), tensors(2)

    def step() -> None:
        nn.functional.mse_loss(model(batch), wanted).backward()

    with simulated_accelerator(speed=SPEED, window_bytes=WINDOW_BYTES, prefetch_bytes=PREFETCH_BYTES):
        profile = hp.profile_memory(model, step, blocks="*.blocks.*", steps=1)
    network = Network(hop_bytes_per_second=HOP_BYTES_PER_SECOND, hop_seconds=0.0)
    mesh = Mesh(pp=case.ranks, stages_per_rank=case.stages_per_rank)
    answer = predict_mesh(profile, mesh, MICRO_BATCHES, schedule=case.schedule, network=network)
    return {
        "peaks": [rank.peak_bytes for rank in answer.ranks],
        "step_seconds": answer.step_seconds,
    }


def run_rank(case: Case, rank: int, place: Path) -> None:
    """One process."""
    faulthandler.dump_traceback_later(LIMIT_S - 10, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "meeting"), case.ranks)
    clock = dist.FileStore(str(place / "clock"), case.ranks)
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=limit)
    keep_profiles()
    rows = rank_rows(case, rank, clock)
    (place / f"rows-{rank}").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run_case(case: Case) -> dict[str, Any]:
    """All processes of one case."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HYPER_PARALLEL_PLATFORM": "torch",
        "HYPER_PARALLEL_SUMMARY": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.pipeline_simulated",
            "--case",
            str(CASES.index(case)),
            "--place",
            folder,
        ]
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(case.ranks)]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() not in (None, 0) for process in processes):
                    raise SystemExit(f"{case.name}: a rank failed")
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        rows = [row for rank in range(case.ranks) for row in json.loads((Path(folder) / f"rows-{rank}").read_text())]
    return {"case": case.name, "rows": rows, "mesh": predicted_rows(case)}


def page(record: dict[str, Any]) -> str:
    """The results for people."""
    lines = [
        "# Pipelines on simulated devices",
        "",
        f"`python -m benchmarks.pipeline_simulated --out benchmarks/results/NAME`; torch {record['versions']['torch']}, Python "
        f"{record['versions']['python']}, hyper_parallel {record['versions']['hyper_parallel']}; gloo, one process "
        "for each rank.",
        "",
        "Peaks and seconds are those of simulated devices with a clock (`DeviceSpeed`), not of real ones. "
        f"Budget: {SHARE:.0%} of each rank's activations in the plain pipeline. {MICRO_BATCHES} micro-batches. "
        "Predicted before it was measured.",
        "",
    ]
    for result in record["results"]:
        lines += [f"## {result['case']}", "", _HEAD, "|---|---|---|---|---|---|---|---|---|---|"]
        for row in result["rows"]:
            lines.append(_line(row))
        plain = sorted((row for row in result["rows"] if row["what"] == "plain"), key=lambda row: int(row["rank"]))
        measured = plain[0]["step_seconds"]
        predicted = result["mesh"]["step_seconds"]
        lines += ["", "`plan --mesh`, from the profile of the whole model in one process, of the plain pipeline:", ""]
        lines += ["| rank | peak predicted | measured | off |", "|---|---|---|---|"]
        for row, peak in zip(plain, result["mesh"]["peaks"]):
            off = peak / row["peak_bytes"] - 1
            lines.append(f"| {row['rank']} | {_mib(peak)} | {_mib(row['peak_bytes'])} | {off:+.1%} |")
        lines += [
            "",
            f"Step: predicted {predicted * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms ({predicted / measured - 1:+.1%}).",
            "",
        ]
    return "\n".join(lines)


_HEAD = (
    "| rank | way | budget | peak predicted | measured | step predicted | measured | swapped out | misses | same bits |"
)


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.2f} MiB"


def _line(row: dict[str, Any]) -> str:
    predicted = row.get("predicted_step_seconds")
    cells = [
        str(row["rank"]),
        {"plain": "plain", "budget": "budget", "recomputed": "budget, no swapping"}[row["what"]],
        _mib(row.get("budget_bytes")),
        _mib(row.get("predicted_peak_bytes")),
        _mib(row["peak_bytes"]),
        "" if predicted is None else f"{predicted * 1e3:.2f} ms",
        f"{row['step_seconds'] * 1e3:.2f} ms",
        _mib(row["swapped_bytes"]),
        str(row["misses"]),
        {True: "yes", False: "NO", None: ""}[row.get("is_bitwise")],
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """All cases, or one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", type=int)
    parser.add_argument("--place", type=Path)
    parser.add_argument("--rank", type=int)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(CASES[args.case], args.rank, args.place)
        return
    chosen = CASES if args.case is None else [CASES[args.case]]
    results = []
    for case in chosen:
        results.append(run_case(case))
        print(json.dumps(results[-1], indent=1, default=str), flush=True)
    if args.out is not None:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "hyper_parallel": __version__}
        record = {"versions": versions, "speed": dataclasses.asdict(SPEED), "results": results}
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
