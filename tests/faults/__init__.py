"""Faults put into real parts of a step, and what becomes of the step."""
