"""Programs as Python source. The source is what runs, here and in the script that a failure prints: there is no second
interpreter that could disagree.

Note: in-place changes across a checkpoint's border
    A recomputed function that changes its own inputs, or whose captured inputs change later, has no meaning that torch
    promises: the replay starts from changed values. Such writes become writes to a clone, unless the program is wild.
    Wild programs keep them, and pass whatever is written anywhere by position, where torch's own check sees it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

from fuzz import doors, effects, harness, operations, rare
from fuzz.program import BLOCKS, RECOMPUTED, THEIRS, Op, Policy, Program, Span, ops_of, to_json
from fuzz.vocabulary import EFFECTS, RARE, SPECS, STATE

__all__ = ["program_to_script", "program_to_source"]

_CHECKPOINTS = ("checkpoint", "checkpoint_wrapper")
_RARE = frozenset(name for family in (*RARE.values(), STATE) for name in family)
_HELPERS_OF_RARE = " fit like own small two"
_BORROWED = -1  # the root of constants and weights: nobody writes those


@dataclasses.dataclass(frozen=True)
class Value:
    """A name in the source, and the storages it may share."""

    name: str
    roots: frozenset[int]


class Lowering:
    """Turns a program into lines. Names are numbered in program order, so two passes over a program agree."""

    def __init__(self, program: Program, written: frozenset[int] | None) -> None:
        self.program = program
        self.written = written  # None in the first pass, which finds out
        self.found_written: set[int] = set()
        self.definitions: list[str] = []
        self._values = 0
        self._spans = 0
        self._has_buffers = self._has_state = self._has_effects = False
        kinds = {action.kind for actions in program.threads for action in actions}
        self._ticks = any(kind.startswith("fail") for kind in kinds) or len(program.threads) > 1
        self._is_shared = "both" in kinds
        self._plans_error_in_replay = "fail_backward" in kinds
        self._takes_gradients = any(SPECS[op.name].takes_gradient for op in ops_of(program.body))
        # Torch's selective contexts serve one backward, and before 2.13 an error inside a replay leaves their modes behind.
        retains = any(action.retain for actions in program.threads for action in actions)
        self._allows_selective = not (retains or kinds & {"fail_backward", "both", "double"})
        self._is_parallel = len(program.threads) > 1 or self._is_shared
        self._recomputed_depth = self._selective_depth = 0

    def _new(self, roots: frozenset[int] | None = None) -> Value:
        number = self._values
        self._values += 1
        return Value(f"v{number}", frozenset({number}) if roots is None else roots)

    def run(self) -> list[str]:
        """All lines of the body of ``build``."""
        inputs = [self._new() for _ in self.program.inputs]
        if any(action.kind == "edit" for actions in self.program.threads for action in actions):
            self.found_written |= {root for value in inputs for root in value.roots}
        visible, lines = self._body(self.program.body, list(inputs), foreign=frozenset())
        outs = [_pick(visible, ref).name for ref in self.program.outs]
        names = ", ".join(value.name for value in inputs)
        return [
            *["B = [torch.zeros((), device=DEVICE)]"] * self._has_buffers,
            *["S = State(DEVICE)"] * self._has_state,
            *["E = Effects(DEVICE)"] * self._has_effects,
            *self.definitions,
            f"def model({names}):",
            *_indent([*lines, f"return [{', '.join(outs)}]"]),
            *[f"model.left_behind = lambda: {self._left_behind()}"] * (self._has_effects or self._has_state),
            "return model",
        ]

    def _left_behind(self) -> str:
        parts = ["*E.left_behind()"] * self._has_effects + ["*S.left_behind()"] * self._has_state
        return f"[{', '.join(parts)}]"

    def _body(
        self, body: tuple[Op | Span, ...], visible: list[Value], foreign: frozenset[int]
    ) -> tuple[list[Value], list[str]]:
        lines: list[str] = []
        for node in body:
            lines += self._op(node, visible, foreign) if isinstance(node, Op) else self._span(node, visible, foreign)
        return visible, lines

    def _op(self, op: Op, visible: list[Value], foreign: frozenset[int]) -> list[str]:
        spec = SPECS[op.name]
        # Torch's selective contexts allow one backward: a gradient inside forward is one too many, with us and without us.
        is_too_much = (
            (spec.is_random and self._is_parallel)
            or (not spec.is_shareable and self._is_shared)
            or (spec.takes_gradient and self._selective_depth > 0)
            # Torch's own checkpoint, with which a run that fails inside a recompute is compared, would change it twice.
            or ((op.name in STATE or op.name in EFFECTS) and self._plans_error_in_replay)
            # Torch's kernel changes the running statistics after it saved them, and no counter tells: a copy that starts late
            # is not what the checksum was taken of.
            or (op.name == "effect_norms" and self.program.settings.verify)
        )
        name = "sin" if is_too_much else op.name
        spec = SPECS[name]
        operands = [_pick(visible, ref) for ref in (*op.ins, 0, 0)[: spec.ins]]
        texts = [operand.name for operand in operands]
        roots = frozenset().union(*(operand.roots for operand in operands)) if spec.aliases else None
        if spec.writes:
            target = operands[0].roots
            if _BORROWED in target or target & foreign:
                texts[0] = f"clone({texts[0]})"
                roots = None
            else:
                self.found_written |= target
        for letter, ref in zip(spec.weights, (*op.weights, 0, 0)):
            texts.append(self._weight(letter, ref))
            if spec.aliases:
                roots = frozenset({_BORROWED})
        texts += [str(op.number)] * spec.has_number
        if op.name.startswith("mark"):
            texts.insert(0, "hp")
        if spec.needs_tick:
            texts.insert(0, "tick")
        made = [self._new(roots) for _ in range(spec.outs)]
        visible += made
        line = f"{', '.join(value.name for value in made)} = {name}({', '.join(texts)})"
        return ["tick()", line] if self._ticks else [line]

    def _weight(self, letter: str, ref: int) -> str:
        if letter == "s":
            self._has_state = True
            return "S"
        if letter == "e":
            self._has_effects = True
            return "E"
        if letter == "b":
            # What is recomputed changes its buffers twice, as torch documents; threads would change them in any order.
            self._has_buffers = True
            return "B[0].clone()" if self._recomputed_depth or len(self.program.threads) > 1 else "B[0]"
        if letter == "c" and self.program.constants:
            return f"C[{ref % len(self.program.constants)}]"
        wanted = 2 if letter == "m" else 1
        fitting = [index for index, weight in enumerate(self.program.weights) if len(weight.shape) == wanted]
        if fitting and letter != "c":
            return f"W[{fitting[ref % len(fitting)]}]"
        return f"torch.ones({'2, 2' if letter == 'm' else '2'}, device=DEVICE)"

    # ---------------------------------------------------------------- spans

    def _span(self, span: Span, visible: list[Value], foreign: frozenset[int]) -> list[str]:
        number = self._spans
        self._spans += 1
        is_recomputed = span.kind in RECOMPUTED
        inner_foreign = foreign
        if is_recomputed and not self.program.is_wild:
            inner_foreign = foreign | {root for value in visible for root in value.roots}
        before = len(visible)
        written_before = set(self.found_written)
        self._recomputed_depth += is_recomputed
        self._selective_depth += span.kind == "torch_selective"
        inner, lines = self._body(span.body, list(visible), inner_foreign)
        self._recomputed_depth -= is_recomputed
        self._selective_depth -= span.kind == "torch_selective"
        results = [_pick(inner, ref) for ref in span.outs] or [_pick(inner, 0)]
        if span.kind in BLOCKS:
            visible += inner[before:]
            return [f"with {BLOCKS[span.kind]}:", *_indent(lines or ["pass"])]
        used = _used_names(lines, results)
        arguments = [value for value in visible if value.name in used]
        writes_inputs = bool((self.found_written - written_before) & {r for value in arguments for r in value.roots})
        form = "tuple" if span.kind == "torch_reentrant" else span.form
        # A captured tensor that torch's reentrant checkpoint returns becomes its output in place: a graph with a cycle.
        kept = "clone({})" if span.kind == "torch_reentrant" else "{}"
        texts = [kept.format(value.name) for value in results]
        if keyword := _keyword(span):
            texts[0] = f"by_keyword({texts[0]}, {keyword[0]})"
        lines += [f"return {_packed(texts, form)}"]
        passing = self._passing(span, [*arguments, *results] if span.calls > 1 else arguments)
        self._define(span, number, [value.name for value in arguments], passing, lines)
        calls = 1 if writes_inputs or not arguments else span.calls
        text: list[str] = []
        for call in range(calls):
            outs = [self._new(value.roots) for value in results]
            names = [value.name for value in arguments]
            if call:
                names[0] = visible[-len(outs)].name
                outs = [Value(out.name, out.roots | visible[-len(outs)].roots) for out in outs]
            text += self._call(span, number, names, passing, [value.name for value in outs])
            visible += outs
        return text

    def _passing(self, span: Span, arguments: list[Value]) -> str:
        touched = {root for value in arguments for root in value.roots}
        is_written = self.written is None or (span.kind in RECOMPUTED and touched & self.written)
        # Torch's reentrant checkpoint and module hooks see tensors given by position only; its non-reentrant one does not keep
        # the random state of a device that it sees by keyword, which a gradient inside forward shows at once.
        if is_written or span.kind in THEIRS or span.module == "backward_hook" or self._takes_gradients:
            return "args"
        return span.passing

    def _define(self, span: Span, number: int, names: list[str], passing: str, lines: list[str]) -> None:
        keyword = _keyword(span)
        by_name = [keyword[0]] if keyword else []
        by_position = ["W"] if _reads_weights(span) else []
        if passing == "kwargs":
            by_name = names + by_name
        elif passing == "nested":
            lines = [f"[{', '.join(names)}], _ = box['values'], box['other']", *lines]
            by_position.append("box")
        else:
            by_position += names
        parameters = ", ".join([*by_position, *["*"] * bool(by_name), *by_name])
        self.definitions += [f"def span{number}({parameters}):", *_indent(lines)]
        if span.policy is not None and span.kind in _CHECKPOINTS:
            self.definitions.append(f"policy{number} = {_policy(span.policy)}")
        if span.kind.endswith("_wrapper"):
            keywords = ", ".join(["", *self._keywords(span, number)])
            # Torch's own backward hooks of a module keep the gradients on the module: two threads take each other's.
            module = "module" if span.module == "backward_hook" and self._is_shared else span.module
            inside = f"span{number}" if module == "none" else f"Block(span{number}, W, {module!r})"
            if _reads_weights(span):
                inside = f"Reading(span{number}, W)"
            self.definitions.append(f"wrapped{number} = hp.{span.kind}({inside}{keywords})")

    def _keywords(self, span: Span, number: int) -> list[str]:
        keywords: list[str] = []
        if span.kind in _CHECKPOINTS:
            keywords += ["swap_inputs=True"] * span.swap_inputs
            keywords += [f"policy_fn=policy{number}"] * (span.policy is not None)
            keywords += ["early_stop=False"] * (not span.early_stop)
        elif span.tensor_policy != "none":
            keywords.append(f"policy_fn={span.tensor_policy}(hp)")
        if span.config:
            keywords.append(
                f"swap_config=hp.SwapConfig({', '.join(f'{name}={value!r}' for name, value in span.config)})"
            )
        return keywords

    def _call(self, span: Span, number: int, names: list[str], passing: str, outs: list[str]) -> list[str]:
        keywords: list[str] = []
        if passing == "nested":
            given = [f"{{'values': [{', '.join(names)}], 'other': None}}"]
        elif passing == "kwargs":
            given = [f"{name}={value}" for name, value in zip(self._parameters(number), names)]
        else:
            given = names
        if span.kind == "plain":
            function = f"span{number}"
        elif span.kind.endswith("_wrapper"):
            function = f"wrapped{number}"
            keywords = ["=".join(_keyword(span))] if _keyword(span) else []
            if _reads_weights(span):
                function, given = span.module, [function, "W", *given]
        elif span.kind in THEIRS:
            is_refused = span.kind == "torch_selective" and not self._allows_selective
            function = "torch_checkpoint_of" if is_refused else f"{span.kind}_of"
            given = ["hp", f"span{number}", *given]
        else:
            function = f"hp.{span.kind}"
            given = [f"span{number}", *given]
            keywords = self._keywords(span, number)
        call = f"{function}({', '.join([*given, *keywords])})"
        if len(outs) == 1:
            return [f"{outs[0]} = {call}"]
        if span.form == "dict" and span.kind != "torch_reentrant":
            return [f"{', '.join(outs)} = {call}.values()"]
        return [f"{', '.join(outs)} = {call}"]

    def _parameters(self, number: int) -> list[str]:
        head = next(line for line in self.definitions if line.startswith(f"def span{number}("))
        return re.findall(r"v\d+", head)


def _pick(visible: list[Value], ref: int) -> Value:
    return visible[len(visible) - 1 - ref % len(visible)]


def _reads_weights(span: Span) -> bool:
    """Whether its function is given the weights of its module, which the caller may replace."""
    return span.kind.endswith("_wrapper") and span.module in ("other_weights", "weights_inside")


def _keyword(span: Span) -> list[str]:
    """The name and the value of a wrapped module's own keyword; nothing where it has none."""
    return span.keyword.split("=") if span.kind.endswith("_wrapper") and span.keyword != "none" else []


def _used_names(lines: list[str], results: list[Value]) -> set[str]:
    used = {value.name for value in results}
    for line in lines:
        used |= set(re.findall(r"\bv\d+\b", line))
    return used


def _packed(names: list[str], form: str) -> str:
    if len(names) == 1:
        return names[0]
    if form == "dict":
        return "{" + ", ".join(f"{f'k{index}'!r}: {name}" for index, name in enumerate(names)) + "}"
    return f"[{', '.join(names)}]" if form == "list" else f"({', '.join(names)})"


def _policy(policy: Policy) -> str:
    if policy.form == "list":
        return repr([name for name, _ in policy.table])
    return f"{policy.form}_policy(hp, {dict(policy.table)!r}, {policy.otherwise!r})"


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def program_to_source(program: Program) -> str:
    """The part of a script that is this program: its tensors, ``build`` and the schedule."""
    first = Lowering(program, None)
    first.run()
    lines = Lowering(program, frozenset(first.found_written)).run()
    settings = dataclasses.asdict(program.settings)
    actions = ",\n".join("    [" + ", ".join(_action(action) for action in thread) + "]" for thread in program.threads)
    return "\n".join(
        [
            f"SEED = {program.seed}",
            f"WEIGHTS = {_tensors(program.weights)}",
            f"INPUTS = {_tensors(program.inputs)}",
            f"CONSTANTS = {_tensors(program.constants)}",
            f"SETTINGS = {settings!r}",
            f"THREADS = [\n{actions},\n]",
            "",
            "",
            "def build(hp, W, C, tick):",
            *_indent(lines),
            "",
        ]
    )


def _action(action: Any) -> str:
    return repr((action.kind, action.batch, action.at, action.retain))


def _tensors(tensors: Any) -> str:
    rows = [(one.shape, one.dtype, one.requires_grad, one.is_parameter, one.hook) for one in tensors]
    return f"[{', '.join(map(repr, rows))}]"


_HEADER = '''"""{title}

Runs one training program twice, with hyper_parallel and without it, and compares every output and gradient bitwise.
Run it from the repository root: python this_file.py [cuda]
"""

from __future__ import annotations
'''

_FOOTER = """
# The program as data (fuzz.program.from_json reads it):
# {json}

if __name__ == "__main__":
    DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    sys.exit(main(sys.modules["__main__"].__dict__, DEVICE))
"""


def program_to_script(program: Program, title: str = "A fuzzed training program.") -> str:
    """A script that needs only torch and hyper_parallel, and exits with 1 when the two runs differ."""
    source = program_to_source(program)
    rare_ones = [_pasted(rare)] if any(re.search(rf"\b{name}\(", source) for name in _RARE) else []
    rare_ones += [_pasted(effects)] if any(re.search(rf"\b{name}\(", source) for name in EFFECTS) else []
    helpers = _needed_operations(source + _HELPERS_OF_RARE * bool(rare_ones))
    return "\n".join(
        [
            _HEADER.format(title=textwrap.fill(title, 118).replace('"""', "'''").replace("\\", "/")),
            _pasted(doors),
            _pasted(harness),
            "import torch.nn.functional as F  # noqa: E402",
            "",
            'DEVICE = "cpu"',
            "",
            *helpers,
            *rare_ones,
            "# " + "-" * 60 + " the program",
            "",
            source,
            _FOOTER.format(json=to_json(program)),
        ]
    )


def _pasted(module: Any) -> str:
    """A module's source without what only a module has."""
    text = inspect.getsource(module).split("from __future__ import annotations\n", 1)[1]
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("from fuzz"))


def _needed_operations(source: str) -> list[str]:
    """The source of every operation that the program calls, and what those call."""
    known = {
        name: inspect.getsource(value)
        for name, value in vars(operations).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == operations.__name__
    }
    needed: set[str] = set()
    texts = [source]
    while texts:
        text = texts.pop()
        for name in set(re.findall(r"\b([A-Za-z_]\w*)\b", text)) & known.keys() - needed:
            needed.add(name)
            texts.append(known[name])
    return [text + "\n" for name, text in known.items() if name in needed]
