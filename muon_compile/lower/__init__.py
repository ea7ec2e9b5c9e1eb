"""From a step to a compiled callable: trace, check, and one file per backend."""
