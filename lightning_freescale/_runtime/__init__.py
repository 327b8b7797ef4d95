"""Threads, code places, nested batches and values of all ranks: what several packages need of the running process."""
