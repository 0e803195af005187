"""Planning: numbers in, a plan out. This package imports no framework.

``profile`` is what was measured, ``step_simulator`` simulates one step with given fates, ``solve`` searches the fates,
``plan`` is the answer with its reasons. Measuring a step and applying a plan are in ``backends.<framework>.planner``.
"""
