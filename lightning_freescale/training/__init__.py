"""Code that every training loop with sharded tables needs, below the Trainer's strategy and Fabric's.

``setup`` finds and shards the tables of a module, ``table_step`` runs their exchange in each step, ``lookahead_loader`` and
``lookahead`` find the ids of the next batch, and ``clipping`` clips the dense part and the tables together.
"""
