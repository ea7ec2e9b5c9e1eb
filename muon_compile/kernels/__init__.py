"""Kernels of this library's own, each behind an operator of ``build``; nothing here is imported before it is needed."""
