"""Other libraries' optimizers: the real ones where they are installed or lie in a folder, else by their formulas."""
