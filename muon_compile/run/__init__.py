"""Binds a plan to live optimizers and runs it; the only floor that mutates tensors."""
