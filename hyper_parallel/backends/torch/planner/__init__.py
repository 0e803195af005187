"""Planning on torch: blocks found, steps watched, rules and plans put in place. The planning itself is in ``planner``."""

from hyper_parallel.backends.torch.planner.device_memory import device_memory
from hyper_parallel.backends.torch.planner.links import link_probe
from hyper_parallel.backends.torch.planner.measure import measure_step
from hyper_parallel.backends.torch.planner.plan_regions import AppliedPlan, apply_plan
from hyper_parallel.backends.torch.planner.profiling import profile_memory
from hyper_parallel.backends.torch.planner.rule_regions import AppliedRules, apply_rules
from hyper_parallel.backends.torch.planner.saved_values import list_saved
from hyper_parallel.backends.torch.planner.step_identity import identify_step
from hyper_parallel.backends.torch.planner.survey import list_ops
from hyper_parallel.backends.torch.planner.trial_guard import guarded
from hyper_parallel.backends.torch.planner.world import world

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
