"""Arguments and results of the types that annotations name."""
