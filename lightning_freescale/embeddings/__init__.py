"""TorchRec's sharded embedding collections behind one seam."""

from lightning_freescale._torchrec import require_torchrec

require_torchrec()
