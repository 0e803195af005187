"""The calls of a tier, as the engine makes them, with a stream of their own."""

from __future__ import annotations

import torch

from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Tier

from .backend import TorchBackend


def lend(tier: Tier, backend: TorchBackend, nbytes: int) -> Lease:
    lease = tier.reserve(backend, nbytes)
    assert isinstance(lease, Lease), lease
    return lease


def write(tier: Tier, lease: Lease, source: torch.Tensor, backend: TorchBackend):
    return tier.write(lease, source, backend=backend, stream=backend.new_stream(), ready=backend.ready())


def read(tier: Tier, lease: Lease, backend: TorchBackend, target: torch.Tensor | None = None):
    target = backend.allocate(lease.nbytes) if target is None else target
    return target, tier.read(lease, target, backend=backend, stream=backend.new_stream(), ready=backend.ready())
