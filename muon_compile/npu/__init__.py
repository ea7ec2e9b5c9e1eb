"""TorchAir on a machine without an NPU: its own Python lowers a step to a GE graph, and that graph runs on the CPU.

``wheel`` fetches TorchAir's Python from a torch_npu wheel, ``stand_in`` takes the place of its one extension module,
``graph`` is a GE graph as plain data, and ``interpret`` runs one. Nothing here imports torchair or torch_npu.
"""
