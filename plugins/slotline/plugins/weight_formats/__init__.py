"""Weight formats: readers of quantized checkpoints, and quantizers of plain ones at load."""
