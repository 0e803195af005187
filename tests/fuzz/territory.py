"""Where a generator may go: which operations, spans and schedules it draws from.

``first`` is the territory of the recorded runs, whose programs keep their numbers. Each rare family has a territory of its
own, in which it is every third operation. ``unseen`` has writes that no op makes, in regions with policies. ``calls`` has
wrapped layers that are called with other weights than their own (``functional_call``) or with keywords that torch's checkpoint
takes, and schedules that change a weight before backward; torch's own checkpoint is wrong there, so it is not in ``wide``, which
has everything else.
"""

from __future__ import annotations

import dataclasses

from fuzz.operations import SPECS as KNOWN
from fuzz.program import THEIRS
from fuzz.vocabulary import EFFECTS, RARE, STATE

__all__ = ["POLICIES", "TERRITORIES", "WIDE", "Territory"]

_MATRICES = ("linear", "linear", "linear_bias", "matmul", "attention", "bmm", "embedding", "layer_norm", "layer_norm")
_POINTWISE = (
    "tanh",
    "relu",
    "gelu",
    "sigmoid",
    "exp",
    "sin",
    "square",
    "softmax",
    "log_softmax",
    "plain_norm",
    "custom",
)
_BINARY = ("add", "mul", "sub", "div", "where", "cat", "stack", "branch", "times_constant")
_REDUCTIONS = ("mean", "total", "amax", "logsumexp", "cross_entropy", "gather", "sort")
_VIEWS = ("transpose", "narrow", "columns", "select", "chunk", "split_views", "expand", "flatten", "unsqueeze", "strided",
          "constant", "weight_view", "contiguous")  # fmt: skip
_WRITES = tuple(name for name, spec in KNOWN.items() if spec.writes)
_RANDOM = ("dropout", "noise", "bernoulli", "attention_dropout")
_OTHER = ("cast", "cast", "detach", "clone", "empty", "mark", "mark", "mark_tree", "gate")
_FAMILIES = (_POINTWISE, _MATRICES, _BINARY, _VIEWS, _WRITES, _POINTWISE, _MATRICES, _BINARY, _VIEWS, _POINTWISE, _OTHER,
             _MATRICES, _POINTWISE, _MATRICES, _RANDOM, _REDUCTIONS)  # fmt: skip

_SPAN_KINDS = ("swap", "checkpoint", "swap_wrapper", "checkpoint", "checkpoint_wrapper", "plain", "no_grad", "autocast",
               "checkpoint", "swap", "checkpoint_wrapper", "swap_wrapper", "swap", "checkpoint", "swap_wrapper")  # fmt: skip
POLICIES = ("MUST_SAVE", "MUST_SWAP", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_SWAP", "MUST_SWAP")
_POLICY_OPS = (
    "mm", "addmm", "bmm", "mul", "add", "tanh", "exp", "relu", "sigmoid", "gelu", "_softmax", "native_layer_norm",
    "native_dropout", "bernoulli", "rand_like", "clone", "sin", "cat", "sum", "div", "sub", "where", "_to_copy",
    "view", "add_", "mul_", "bernoulli_", "_scaled_dot_product_flash_attention_for_cpu", "stack", "sort", "gather",
    "pow", "t", "slice", "embedding", "max", "amax", "logsumexp", "_unsafe_view", "empty_like", "nll_loss_forward",
)  # fmt: skip


_RARE_POLICY_OPS = (
    "wave", "pair", "halves", "thinned", "sprinkled", "numbers", "add_onto", "shake", "rand", "randn", "uniform_",
    "randperm", "randint", "index", "complex", "view_as_real", "real", "_fft_r2c", "_fft_c2r", "unfold",
    "native_batch_norm", "cos", "abs", "neg", "conj", "gt", "ne", "resolve_conj",
)  # fmt: skip
_ALL_RARE = tuple(tuple(family) for family in RARE.values())
_OVER_LEAVES = ("linear", "linear", "linear_bias", "linear_of_values", "fresh_leaf")
_ON_A_TAPE = ("checkpoint", "checkpoint_wrapper", "swap", "checkpoint", "checkpoint_wrapper", "swap_wrapper", "no_grad",
              "autocast", "plain")  # fmt: skip
_CALLED = ("checkpoint_wrapper", "checkpoint_wrapper", "checkpoint_wrapper", "swap_wrapper", "checkpoint", "swap",
           "no_grad", "autocast", "plain")  # fmt: skip
_AROUND = (
    "enable_grad",
    "autocast_off",
    "autocast_uncached",
    "copying_hooks",
    "save_on_cpu",
    "passing_mode",
    "autocast",
)


_UNSEEN = tuple(name for name in EFFECTS if name.startswith("raw_"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Territory:
    """What there is to choose from; an option that is named twice comes twice as often."""

    families: tuple[tuple[str, ...], ...] = _FAMILIES
    span_kinds: tuple[str, ...] = _SPAN_KINDS
    policy_ops: tuple[str, ...] = _POLICY_OPS
    autocast_percent: int = 0  # how often all of the model runs under autocast
    double_percent: int = 0  # how often the schedule takes second derivatives
    policy_percent: int = 70  # how often a checkpoint has a policy
    call_percent: int = 0  # how often a wrapper is called with other weights, and how often with a keyword of torch's
    weight_percent: int = 0  # how often the schedule changes a weight between a forward and its backward
    rare_percent: int = 0  # how often a wrapper is a module, a weight is no parameter, two threads share a graph

    @property
    def calm_families(self) -> tuple[tuple[str, ...], ...]:
        """Without in-place changes."""
        calm = (tuple(name for name in family if not name.endswith("_")) for family in self.families)
        return tuple(family for family in calm if family)


_RARE_OPS = _POLICY_OPS + _RARE_POLICY_OPS

TERRITORIES: dict[str, Territory] = {
    "first": Territory(),
    **{
        name: Territory(families=_FAMILIES + (tuple(family),) * 8, policy_ops=_RARE_OPS)
        for name, family in RARE.items()
    },
    "state": Territory(families=_FAMILIES + (tuple(STATE),) * 8, policy_ops=_RARE_OPS),
    "effects": Territory(
        families=_FAMILIES + (tuple(EFFECTS),) * 10, span_kinds=_ON_A_TAPE, double_percent=15, policy_percent=15
    ),
    "unseen": Territory(
        families=_FAMILIES[:4] + (_UNSEEN,) * 8,
        span_kinds=_ON_A_TAPE,
        policy_ops=("cos", "tanh", "sin", "mul", "mm", "cos", "to", "detach"),
        policy_percent=85,
    ),
    "calls": Territory(
        families=_FAMILIES + (_MATRICES,) * 8, span_kinds=_CALLED, policy_percent=40, call_percent=60, weight_percent=50
    ),
    "second": Territory(families=_FAMILIES + _ALL_RARE, span_kinds=_ON_A_TAPE, double_percent=80, policy_percent=30),
    "around": Territory(span_kinds=_SPAN_KINDS + _AROUND * 2),
    "theirs": Territory(span_kinds=_SPAN_KINDS + THEIRS * 3),
    "modules": Territory(rare_percent=50),
    "autocast": Territory(families=_FAMILIES + (_OVER_LEAVES,) * 8, autocast_percent=75, rare_percent=50),
    "wide": Territory(
        families=_FAMILIES + _ALL_RARE * 2,
        span_kinds=_SPAN_KINDS * 2 + _AROUND + THEIRS * 2,
        policy_ops=_RARE_OPS,
        autocast_percent=15,
        rare_percent=15,
    ),
}
WIDE = TERRITORIES["wide"]
