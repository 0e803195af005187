"""Activation memory on MindSpore. Run by ``make test-mindspore``, in MindSpore's own environment.

The folder cannot be called after the framework: pytest would import it instead.
"""
