"""A project with modules of its own beside its program."""
