"""State dicts of one optimizer made into those of another.

``formats`` knows what each library's groups and state look like, as far as its adapter does not; ``parts`` is what they
have in common; ``reading`` and ``writing`` lead there and back; ``convert`` has the function.
"""

# What formats.FORMATS has; here, because the command's help does not wait for torch.
NAMES = ("torch", "keller", "moonlight", "dion", "hyperparallel", "heavyball", "muon_compile")
