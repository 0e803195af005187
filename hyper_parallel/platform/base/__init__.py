"""The Platform contract, one file per group of members.

Each file holds one mixin; ``hyper_parallel.platform.platform.Platform`` is their sum. What needs no framework is
written here once. What needs one raises :class:`hyper_parallel.errors.UnsupportedMemberError` until a platform
overrides it. No file of this package may import torch or mindspore.
"""
