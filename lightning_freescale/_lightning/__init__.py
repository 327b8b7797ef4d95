"""The layer between Lightning and the package. Only these modules import Lightning and use its private names.

``loops`` covers loops, loaders and checkpoints, ``ddp`` covers DDP strategies and the default process group, and ``profiler``
covers what the bubble profiler needs.
"""
