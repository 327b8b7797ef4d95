"""The floor between Lightning and the package: its changes, and its private names, touch only these modules.

``loops`` has Lightning's names and what is private in its loops, ``ddp`` what is private in DDPStrategy, ``rendezvous`` how
the default process group is created, ``loader_wrapper`` a loader that Lightning cannot tell from the one inside, ``stages`` the
stages of any strategy's step on a timeline.
"""
