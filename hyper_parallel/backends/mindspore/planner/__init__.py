"""Planning on MindSpore: blocks found, steps watched, rules and plans put in place. The planning itself is in ``planner``."""

from hyper_parallel.backends.mindspore.planner.measure import identify_step, link_probe, measure_step
from hyper_parallel.backends.mindspore.planner.meters import device_memory, world
from hyper_parallel.backends.mindspore.planner.plan_regions import AppliedPlan, apply_plan
from hyper_parallel.backends.mindspore.planner.profiling import profile_memory
from hyper_parallel.backends.mindspore.planner.rule_regions import AppliedRules, apply_rules
from hyper_parallel.backends.mindspore.planner.saved_values import list_saved
from hyper_parallel.backends.mindspore.planner.survey import list_ops
from hyper_parallel.backends.mindspore.planner.trial_guard import guarded

__all__ = [
    "AppliedPlan",
    "AppliedRules",
    "apply_plan",
    "apply_rules",
    "device_memory",
    "guarded",
    "identify_step",
    "link_probe",
    "list_ops",
    "list_saved",
    "measure_step",
    "profile_memory",
    "world",
]
