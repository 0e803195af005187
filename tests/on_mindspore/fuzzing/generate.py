"""Draws programs for MindSpore. The data and the choices are those of ``tests/fuzz``; ops and schedules are MindSpore's.

MindSpore has no ``backward()``: an action ``train`` is a forward and its backward, and ``forward`` and ``backward`` are the two
halves of one where several graphs live at once.
"""

from __future__ import annotations

from fuzz.choices import Choices, RandomChoices, chance, settings_of
from fuzz.program import Action, Op, Policy, Program, Span, Tensor

from .operations import SPECS

__all__ = ["generate", "program_number"]

_MATRICES = (
    "linear",
    "linear",
    "linear_bias",
    "dense",
    "matmul",
    "attention",
    "bmm",
    "embedding",
    "layer_norm",
    "layer_norm",
)
_POINTWISE = (
    "tanh",
    "relu",
    "gelu",
    "sigmoid",
    "silu",
    "exp",
    "sin",
    "square",
    "softmax",
    "older_softmax",
    "clamp",
    "custom",
)
_BINARY = ("add", "mul", "sub", "div", "where", "cat", "branch", "times_weight")
_VIEWS = (
    "transpose",
    "narrow",
    "columns",
    "chunk",
    "split",
    "expand",
    "flatten",
    "unsqueeze",
    "dense_copy",
    "weight_view",
)
_WRITES = ("copied_into", "copy_", "item_set")
_DRAWS = ("dropout", "randn", "uniform", "python_draws", "numpy_draws")
_STATE = ("state_counts", "state_buffer", "batch_norm")
_OTHER = ("half", "double", "detach", "mean", "total", "amax", "gather")
_FAMILIES = (_POINTWISE, _MATRICES, _BINARY, _VIEWS, _POINTWISE, _MATRICES, _BINARY, _WRITES, _OTHER, _POINTWISE, _DRAWS,
             _MATRICES, _VIEWS, _STATE, _POINTWISE, _MATRICES)  # fmt: skip

_SPAN_KINDS = ("checkpoint", "swap", "checkpoint_wrapper", "swap_wrapper", "checkpoint_wrapper", "swap", "checkpoint",
               "plain", "no_grad", "async_save", "checkpoint_wrapper", "swap_wrapper")  # fmt: skip
_POLICIES = ("MUST_SAVE", "MUST_SWAP", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_SWAP", "MUST_SWAP")
_POLICY_OPS = (
    "Dense", "MatMul", "MatMulExt", "BatchMatMulExt", "BiasAdd", "LayerNorm", "Gather", "Tanh", "ReLU", "GeLU", "Sigmoid",
    "SiLU", "Exp", "Sin", "Square", "SoftmaxExt", "Softmax", "AddExt", "Add", "Mul", "Muls", "SubExt", "Div", "Select",
    "Concat", "SumExt", "MeanExt", "Cast", "Dropout", "StandardNormal", "UniformReal", "BatchNorm", "InplaceCopy",
)  # fmt: skip


class _Draft:
    """One program in the making."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.left = choices.integer(2, 14)  # operations
        self.spans_left = choices.integer(1, 5)

    def ref(self) -> int:
        """Mostly recent values, sometimes far back."""
        return self.choices.one_of((0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 5))

    def body(self, depth: int, longest: int) -> tuple[Op | Span, ...]:
        nodes: list[Op | Span] = []
        while len(nodes) < longest and (self.left > 0 or len(nodes) < 2):
            if self.spans_left and depth < 3 and chance(self.choices, 40):
                self.spans_left -= 1
                nodes.append(self.span(depth))
            else:
                nodes.append(self.op())
        return tuple(nodes)

    def op(self) -> Op:
        self.left -= 1
        name = self.choices.one_of(self.choices.one_of(_FAMILIES))
        spec = SPECS[name]
        return Op(
            name=name,
            ins=tuple(self.ref() for _ in range(spec.ins)),
            weights=tuple(self.choices.integer(0, 3) for _ in spec.weights),
        )

    def span(self, depth: int) -> Span:
        choices = self.choices
        kind = choices.one_of(_SPAN_KINDS)
        is_checkpoint = kind.startswith("checkpoint")
        return Span(
            kind=kind,
            body=self.body(depth + 1, choices.one_of((3, 2, 1, 4, 6))),
            outs=choices.one_of(((0,), (0,), (0, 1), (0, 1, 2), (0, self.ref()))),
            form=choices.one_of(("tuple", "list", "dict")),
            passing=choices.one_of(("args", "args", "kwargs", "nested")),
            calls=choices.one_of((1, 1, 1, 2)),
            swap_inputs=is_checkpoint and chance(choices, 50),
            policy=self.policy() if is_checkpoint and chance(choices, 65) else None,
            tensor_policy="none"
            if is_checkpoint
            else choices.one_of(("none", "none", "none", "save_even", "all_save")),
            module=choices.one_of(("module", "module", "none")),
        )

    def policy(self) -> Policy:
        choices = self.choices
        form = choices.one_of(("function", "list", "bools", "cycle", "function"))
        names = {choices.one_of(_POLICY_OPS) for _ in range(choices.integer(0, 10))}
        table = tuple((name, choices.one_of(_POLICIES)) for name in sorted(names))
        return Policy(form=form, table=table, otherwise=choices.one_of(_POLICIES[::-1]))


def _tensors(choices: Choices) -> dict[str, tuple[Tensor, ...]]:
    rows = choices.one_of((3, 2, 1, 5, 16))
    columns = choices.one_of((4, 2, 1, 8, 32))

    def shape() -> tuple[int, ...]:
        return choices.one_of(((columns, columns), (2 * columns, columns), (columns, 2 * columns), (columns,)))

    return {
        "weights": tuple(
            Tensor(shape=shape(), requires_grad=number == 0 or not chance(choices, 20))
            for number in range(choices.integer(1, 4))
        ),
        "inputs": tuple(Tensor(shape=(rows, columns)) for _ in range(choices.integer(1, 2))),
        "constants": (Tensor(shape=(rows, columns), requires_grad=False),),
    }


def _actions(*words: str) -> tuple[Action, ...]:
    """``train0`` is action ``train`` on batch 0."""
    return tuple(
        Action(kind=word.rstrip("0123456789"), batch=int(word[-1]) if word[-1].isdigit() else 0) for word in words
    )


_SCHEDULES: tuple[tuple[Action, ...], ...] = (
    _actions("train0"),
    _actions("train0", "step", "train1", "step", "train0"),
    _actions("train0", "train1", "train2", "step", "train0"),  # micro-batches: gradients add up until the step
    _actions("forward0", "forward1", "backward0", "backward1", "step", "train0"),
    _actions("forward0", "forward1", "backward1", "backward0"),
    _actions("forward0", "forward1", "backward0", "forward2", "backward1", "forward3", "backward2", "backward3"),
    _actions(
        "forward0", "forward1", "forward2", "forward3", "backward0", "backward1", "backward2", "backward3", "step"
    ),
    _actions("forward0", "forward1", "forward2", "backward1", "backward2", "backward0"),
    _actions("forward0", "drop", "train1"),
    _actions("eval0", "train0", "eval1"),
    _actions("forward0", "eval1", "backward0"),
)
_FAILURES = ("fail_forward", "fail_backward")


def _schedule(choices: Choices) -> tuple[Action, ...]:
    if not chance(choices, 20):
        return choices.one_of(_SCHEDULES)
    failure = Action(kind=choices.one_of(_FAILURES), at=choices.integer(0, 25))
    return choices.one_of(
        (
            (failure, *_actions("train0", "step", "train1")),
            (*_actions("train0", "step"), failure, *_actions("train1", "step", "train0")),
            (*_actions("forward0", "forward1", "backward0"), failure, *_actions("train1")),
        )
    )


def generate(choices: Choices) -> Program:
    """One program."""
    draft = _Draft(choices)
    body = draft.body(0, 14)
    newest = choices.one_of((8, 8, 4, 2, 1))
    return Program(
        body=body,
        outs=tuple(range(newest)),
        threads=(_schedule(choices),),
        settings=settings_of(choices),
        seed=choices.integer(0, 99),
        is_wild=chance(choices, 50),
        **_tensors(choices),
    )


def program_number(seed: int, number: int) -> Program:
    """The ``number``-th program of a long run with this seed."""
    return generate(RandomChoices(seed * 1_000_000_007 + number))
