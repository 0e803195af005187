"""The MindSpore side of the border."""
