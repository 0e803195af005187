"""The simulated accelerator: streams, copies and device bytes that are simulated in host memory.

``hyper_parallel.testing`` is its public API. The planner and the demo run on it too, where a machine has no accelerator.
"""
