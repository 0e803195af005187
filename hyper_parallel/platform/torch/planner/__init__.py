"""Planning on torch: blocks found, steps watched, rules and plans put in place. The planning itself is in ``planner``."""

from hyper_parallel.platform.torch.planner.rule_regions import apply_rules
from hyper_parallel.platform.torch.planner.survey import list_ops

__all__ = ["apply_rules", "list_ops"]
