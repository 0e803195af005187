"""The engine on each framework: the adapter of tensors, streams and hooks, and what measures and applies plans.

``core`` says what happens to a saved value and imports no framework. A package here, one per framework, says what a tensor,
a storage, a stream and an op are there. ``hyper_parallel.platform`` is the Platform contract and does not depend on the
engine, except for its few activation members, which call in here.
"""
