"""Training with sharded tables, shared by the strategies for the Trainer and for Fabric.

``setup`` finds and shards the tables of a module, and ``table_step`` runs their exchange in each step. ``lookahead_loader`` and
``next_ids`` find the ids of the next batch. ``clipping`` clips the dense part and the tables together.
"""
