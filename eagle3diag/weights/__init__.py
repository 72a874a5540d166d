"""Two checkpoints against each other, the statistics of one tensor, and a draft rewritten for another reader."""
