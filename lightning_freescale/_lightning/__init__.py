"""The layer between Lightning and the package: Lightning's changes and private names affect only these modules.

``loops`` has Lightning's names and what is private in its loops, loaders and checkpoints, ``ddp`` what is private in its DDP
strategies and in how the default process group is created, ``profiler`` what the bubble profiler needs.
"""
