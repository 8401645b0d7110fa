"""omniq in other people's frameworks: one module each, imported by nobody but you."""
