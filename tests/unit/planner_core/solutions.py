"""Choices of a written plan."""

from hyper_parallel.planner.plan_choices import solution_of

__all__ = ["solution_of"]
