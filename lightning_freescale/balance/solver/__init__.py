"""The search for :func:`lightning_freescale.balance.assign`, with whole numbers, fixed numbers of rounds and no clock.

``bounds`` computes the load that no plan can beat, and the ranks that cause it. ``search`` plans those ranks separately. It
makes a first plan (``lpt``), then swaps pairs of samples (``swaps``), then exchanges several samples at once (``exchanges``).
If few samples miss the bound, it starts again from other first plans. ``padded`` plans for ranks that pad their samples.
"""
