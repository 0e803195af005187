"""The framework's part of planning, as far as it is the same on torch and MindSpore. Imports no framework.

A :class:`~hyper_parallel.backends.planning.module_tree.ModuleTree` says how modules lie in one another.
"""
