"""A package beside the program."""
