"""Rules, profiles, plans and budgets on the simulated accelerator."""
