"""The activation engine on torch, on the simulated accelerator: every promised case, bitwise."""
