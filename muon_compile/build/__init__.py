"""How the step is computed: pure functions over tensors. Nothing here mutates an argument."""
