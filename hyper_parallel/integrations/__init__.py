"""Thin adapters to other people's trainers: a user adds one line.

==================  =====================================================================================
``transformers``    ``Trainer(..., callbacks=[transformers.callback("boundary")])``, ``transformers.switch(model)``
``trl``             ``SFTTrainer(..., callbacks=[trl.callback("boundary")])``
``peft``            ``peft.apply(get_peft_model(model, lora), "boundary")``
``lightning``       ``Trainer(..., callbacks=[lightning.callback("boundary")])``
``accelerate``      ``accelerate.apply(accelerator, model, "boundary")`` after ``prepare``
``fsdp``            ``fsdp.apply(model, "boundary")`` before or after ``fully_shard``
``ddp``             ``ddp.apply(model, "boundary")`` before or after ``DistributedDataParallel``
``pipelining``      ``pipelining.apply(schedule_or_stages, "boundary")``
==================  =====================================================================================

All take the same options: a preset, a mapping of rules, a policy, a plan, or ``budget="20GiB"`` (see
:mod:`~hyper_parallel.integrations.treatment`). Importing an adapter imports no trainer; using one does.
"""

from __future__ import annotations

from hyper_parallel.integrations.treatment import Treated, Treatment, apply

__all__ = ["Treated", "Treatment", "apply"]
