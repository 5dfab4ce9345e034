"""One model over several ranks: processes that each have a part of every layer, and compute every step together.

Rank 0 is the worker that the supervisor knows; it starts the others. `plan.py`, `steps.py` and `ranks.py` need no torch.
"""
