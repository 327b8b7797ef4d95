"""TorchRec's sharded embedding collections behind one seam."""
