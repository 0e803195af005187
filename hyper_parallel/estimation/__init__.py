"""How much memory and time each way of keeping activations would take, by arithmetic: no device and no framework is needed.

``shape`` and ``config_file`` say what the model is, ``cards`` what the device is. ``layer_ops`` lists the ops of one layer with
their work and what autograd saves of them, ``step_model`` adds them up to a step, ``ways`` is what recompute, swap and a plan
make of that step, and ``estimate`` is the public function.
"""

__all__: list[str] = []
