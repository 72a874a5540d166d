"""The draft itself in plain PyTorch: its forward under any ``Wiring``, its agreement with the target, real greedy decoding."""
