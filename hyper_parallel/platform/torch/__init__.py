"""The torch side of the border."""
