"""torch.compile inside our regions, and our regions inside compiled models."""
