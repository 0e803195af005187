"""Measure one training step of your model: ops, bytes, seconds, links.

Runs the step ten to fifteen times and leaves no trace in the model. The profile is what `plan` plans from.

Example::

  hyper-parallel profile train:make_model -o profile.json
"""

from __future__ import annotations

import argparse
from typing import Any

from hyper_parallel.backends.step_observation.framework import observed_framework
from hyper_parallel.cli.console import Console
from hyper_parallel.cli.factory import add_model_arguments, built_model, require_writable, simulated_where_asked
from hyper_parallel.cli.failures import CommandError
from hyper_parallel.config import show_bytes
from hyper_parallel.planner.fit import profile_memory
from hyper_parallel.planner.profile import Profile
from hyper_parallel.records.record_files import as_json

__all__ = ["add_arguments", "measured_profile", "run", "show_profile"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="profile.json", help="default profile.json")


def measured_profile(args: argparse.Namespace, console: Console) -> Profile:
    """The profile of the model that the command line names."""
    with console.progress("profile", 2) as advance:
        advance(f"building {args.factory}")
        model, step = built_model(args.factory)
        if not args.simulate:
            _require_device(model)
        advance("running trial steps")
        with simulated_where_asked(args.simulate):
            return profile_memory(model, step, blocks=args.blocks, steps=args.steps)


def _require_device(model: Any) -> None:
    """Name the option that a model on the CPU needs before anything is run."""
    framework = observed_framework()
    if framework.meter(framework.require_model(model, "profile")) is None:
        raise CommandError(
            "the model is on the CPU, where there is no device memory to plan; add --simulate to count its bytes on the "
            "simulated accelerator, or have the factory move it to an accelerator"
        )


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    require_writable(args.output)
    profile = measured_profile(args, console)
    profile.save(args.output)
    console.data({"profile": args.output, **_figures(profile)})
    show_profile(profile, console)
    console.say(
        f"written to {args.output}; plan from it with: hyper-parallel plan --profile {args.output} --budget 20GiB"
    )
    return 0


def _figures(profile: Profile) -> dict[str, object]:
    return {
        "device": profile.versions.device,
        "blocks": len(profile.blocks),
        "kinds": [kind.name for kind in profile.kinds],
        "peak_bytes": profile.measured.peak_bytes,
        "peak_where": profile.measured.peak_where,
        "step_seconds": profile.measured.step_seconds,
        "measured_under": profile.measured.under,
        "base": as_json(profile.base),
        "link": as_json(profile.link),
    }


def _rate(shared: float, lone: float, ranks: int) -> str:
    text = f"{show_bytes(int(shared))}/s"
    return text if ranks == 1 else f"{text} with {ranks} ranks of this host copying, {show_bytes(int(lone))}/s alone"


def show_profile(profile: Profile, console: Console) -> None:
    """A table of what was measured."""
    measured, base, link = profile.measured, profile.base, profile.link
    rows = [
        ["device", profile.versions.device],
        ["blocks", f"{len(profile.blocks)} ({', '.join(sorted({kind.name for kind in profile.kinds}))})"],
        ["peak", f"{show_bytes(measured.peak_bytes)} {measured.peak_where}".rstrip()],
        ["step", f"{measured.step_seconds * 1e3:.1f} ms, with blocks treated as: {measured.under}"],
        ["weights", show_bytes(base.weights)],
        ["gradients", show_bytes(base.gradients)],
        ["optimizer", show_bytes(base.optimizer)],
        ["link out", _rate(link.out_bytes_per_second, link.lone_out_bytes_per_second, link.copying_ranks)],
        ["link back", _rate(link.in_bytes_per_second, link.lone_in_bytes_per_second, link.copying_ranks)],
    ]
    console.table("One step, measured", ("what", "value"), rows, words=(0, 1))
