"""The floor between Lightning and the package: its changes, and its private names, touch only these modules.

``loops`` has Lightning's names and what is private in its loops, loaders and checkpoints, ``ddp`` what is private in its DDP
strategies and in how the default process group is created, ``stages`` the stages of any strategy's step on a timeline.
"""
