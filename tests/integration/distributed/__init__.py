"""The engine beside torch's own parallelism: two real processes on gloo, the simulated accelerator in each."""
