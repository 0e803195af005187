"""A process that searches beside the one that asks: the same profile, another starting point.

It imports no framework, reads questions from its standard input and writes answers to its standard output, both pickled, and
ends when its input does. ``search_workers`` starts it.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO, Final, NamedTuple

from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.solve import Solver
from hyper_parallel.planner.step_simulator import StepSimulator

__all__ = ["Found", "Question", "serve"]

_ANSWERS: Final = 3


class Question(NamedTuple):
    """One search."""

    number: int
    profile: Profile | None  # None: that of the question before
    corrections: Corrections
    budget: int
    stream: int  # which starting point
    effort: float
    known: tuple[Solution, ...]  # found before, by whomever


class Found(NamedTuple):
    """The best solutions of one search, the best first."""

    number: int  # of the question
    solutions: tuple[Solution, ...]


def serve() -> None:
    """Answer questions until there are none."""
    questions = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed by accident is no answer
    _serve(questions, answers)


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    solver: Solver | None = None
    while True:
        try:
            question: Question = pickle.load(questions)
        except EOFError:
            return
        if question.profile is not None:
            solver = Solver(StepSimulator(question.profile, question.corrections))
        assert solver is not None, "the first question has a profile"
        if question.corrections != solver.simulator.corrections:
            solver = solver.corrected(question.corrections, question.budget)
        pickle.dump(Found(question.number, _search(solver, question)), answers)
        answers.flush()


def _search(solver: Solver, question: Question) -> tuple[Solution, ...]:
    near = [solver.simulate(solution) for solution in question.known]
    solver.solve(question.budget, near=near, effort=question.effort, stream=question.stream)
    return tuple(answer.solution for answer in solver.best_ones(question.budget, _ANSWERS))
