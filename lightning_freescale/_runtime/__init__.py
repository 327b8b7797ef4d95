"""Threads, code locations, nested batches and values of all ranks: tools for the running process that several packages use."""
