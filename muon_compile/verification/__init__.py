"""The step held against the float64 polynomial, on the ranks at hand."""
