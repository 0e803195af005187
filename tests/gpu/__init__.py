"""The engine on a real CUDA device. Asked for by name: ``python -m pytest tests/gpu -m gpu -p no:xdist``."""
