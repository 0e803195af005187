"""The public names of ``hyper_parallel``, one line for each. This is the only list of them.

``hyper_parallel/__init__.py`` imports this module when the first of them is used. ``X as X`` says to type checkers that the
name is public. No module that is imported here imports a framework.
"""

from hyper_parallel._version import __version__ as __version__
from hyper_parallel.config import SwapConfig as SwapConfig
from hyper_parallel.config import configure as configure
from hyper_parallel.core.activation_checkpoint import CheckpointPolicy as CheckpointPolicy
from hyper_parallel.core.activation_checkpoint import SwapManager as SwapManager
from hyper_parallel.core.activation_checkpoint import checkpoint as checkpoint
from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper as checkpoint_wrapper
from hyper_parallel.core.activation_checkpoint import swap as swap
from hyper_parallel.core.activation_checkpoint import swap_tensor_wrapper as swap_tensor_wrapper
from hyper_parallel.core.activation_checkpoint import swap_wrapper as swap_wrapper
from hyper_parallel.core.activation_checkpoint.statistics import SwapStats as SwapStats
from hyper_parallel.core.activation_checkpoint.swap import stats as stats
from hyper_parallel.errors import HyperParallelError as HyperParallelError
from hyper_parallel.estimation.cards import Card as Card
from hyper_parallel.estimation.estimate import Estimate as Estimate
from hyper_parallel.estimation.estimate import estimate as estimate
from hyper_parallel.estimation.shape import ModelShape as ModelShape
from hyper_parallel.planner.fit import apply_plan as apply_plan
from hyper_parallel.planner.fit import fit_memory as fit_memory
from hyper_parallel.planner.fit import profile_memory as profile_memory
from hyper_parallel.planner.plan import Plan as Plan
from hyper_parallel.planner.planning import plan_memory as plan_memory
from hyper_parallel.planner.profile import Profile as Profile
from hyper_parallel.planner.rules import apply_rules as apply_rules
from hyper_parallel.planner.rules import list_ops as list_ops
from hyper_parallel.planner.saved import print_saved as print_saved
from hyper_parallel.platform.platform import get_platform as get_platform
